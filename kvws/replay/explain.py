"""Why a step's view holds the blocks that it holds: a table for people.

What happened is in the step's report; what the blocks say, in the workspace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvws.blocks.key import BLOCK_TOKENS
from kvws.errors import ConfigError
from kvws.limits import Limits
from kvws.observe.step_report import StepReport
from kvws.recall.own_words import own_words
from kvws.recall.plan import Action, Decision
from kvws.recall.recipe import Recipe, SignalName
from kvws.recall.regions import Reason
from kvws.recall.selector import Log
from kvws.recall.text.spelling import Spelling

_TEXT_CHARACTERS = 60
_QUESTION_CHARACTERS = 240
_OF_REGIONS = frozenset(
    {
        *(Reason.SINK, Reason.SYSTEM, Reason.POLICY, Reason.TASK),
        *(Reason.TRAJECTORY, Reason.RECENT),
    }
)


@dataclass(frozen=True)
class ExplainedBlock:
    """A block of the view, or one that was dropped from it.

    Attributes:
        age_blocks: how many numbers were given out between it and the newest block shown.
        text: how it begins, on one line; "" where its tokens are gone.
    """

    decision: Decision
    age_blocks: int
    text: str


@dataclass(frozen=True)
class Explanation:
    """Why one step was answered with what it was answered with.

    Attributes:
        number: of the step.
        recalled: whether blocks were selected; otherwise everything fitted.
        question: its own words, shortened, on one line.
        budget_blocks: size of a freshly selected view.
        places: that its regions left to blocks that competed.
        columns: signals of the recipe, in its order.
        scored_blocks: blocks whose keys were looked at closely.
        spoke: those of them that had anything to say.
        silent: why each other signal that was asked for had not.
        blocks: of the view, in its order, then those that were dropped.
    """

    number: int
    recalled: bool
    question: str
    budget_blocks: int
    places: int
    columns: tuple[SignalName, ...]
    scored_blocks: int
    spoke: tuple[str, ...]
    silent: Mapping[SignalName, str]
    blocks: tuple[ExplainedBlock, ...]


def explain(
    number: int,
    report: StepReport,
    question: Sequence[int],
    log: Log,
    spelling: Spelling,
    limits: Limits,
    *,
    wanted: Recipe,
    recipe: Recipe,
) -> Explanation:
    """Put together what is known of a step.

    Args:
        question: the tokens that its answer was asked with behind the view.
        log: holds the tokens of its blocks.
        wanted: the recipe that was asked for.
        recipe: the one that the model can follow.
    """
    decisions = report.decisions
    newest = max((decision.block for decision in decisions), default=0)
    of_regions = sum(decision.reason in _OF_REGIONS for decision in decisions)
    spoken = [t for t, own in zip(question, own_words(question, spelling), strict=True) if own]
    return Explanation(
        number=number,
        recalled=report.recalled,
        question=_shortened(visible(spelling.decode(spoken).strip())),
        budget_blocks=limits.budget_blocks,
        places=max(0, limits.budget_blocks - of_regions),
        columns=tuple(recipe.weights),
        scored_blocks=report.scored_blocks,
        spoke=report.signals,
        silent={
            signal: _why_silent(signal, recipe, spelling)
            for signal in wanted.weights
            if signal not in report.signals
        },
        blocks=tuple(
            ExplainedBlock(decision, newest - decision.block, _text(decision.block, log, spelling))
            for decision in decisions
        ),
    )


def require_steps(numbers: Sequence[int], steps: int) -> None:
    """Raises ConfigError where one of the numbers is not among 1 … steps."""
    for number in numbers:
        if not 1 <= number <= steps:
            raise ConfigError(
                f"there is no step {number} to explain",
                hint=f"--explain takes 1 to {steps}" if steps else "no step was replayed",
            )


def visible(text: str) -> str:
    """A text on one line, what does not print spelled out: \\n, \\x1b, \\u202e."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def _text(block: int, log: Log, spelling: Spelling) -> str:
    if not log.exists(block):
        return ""
    return visible(spelling.decode(log.block_tokens(block)))[:_TEXT_CHARACTERS]


def _shortened(text: str) -> str:
    """Both ends: a question says at one of them what it is about."""
    if len(text) <= _QUESTION_CHARACTERS:
        return text
    half = _QUESTION_CHARACTERS // 2
    return f"{text[:half]} … {text[-half:]}"


def _why_silent(signal: SignalName, recipe: Recipe, spelling: Spelling) -> str:
    if signal not in recipe.weights:
        return "the model has no profile"
    if signal is SignalName.LEXICAL:
        return "no block has the question's words"
    if signal is SignalName.SUCCESSION:
        if not spelling.opening:
            return "the chat template does not mark turns"
        return "there is no earlier turn"
    return "it finds nothing, or such a question does not ask it"


def print_explanation(console: Console, found: Explanation) -> None:
    """The question and what was looked for, then a line for every block."""
    title = Text(f"step {found.number}", style="bold")
    if not found.recalled:
        console.print(title.append(": nothing was selected, everything fitted", style="not bold"))
        return
    console.print(title.append(f": {found.question}", style="not bold"))
    console.print(
        f"{found.budget_blocks} blocks ({found.budget_blocks * BLOCK_TOKENS:,} tokens), "
        f"{found.places} of them for blocks that compete; chosen by "
        f"{', '.join(found.spoke) or 'age alone'}; keys of {found.scored_blocks:,} blocks scored",
        highlight=False,
    )
    for signal, why in found.silent.items():
        console.print(f"without {signal}: {why}", highlight=False)
    console.print(_table(found))


def _table(found: Explanation) -> Table:
    table = Table(header_style="bold", padding=(0, 1), box=None)
    for name in ("block", "action", "reason", "signal", "score", *found.columns, "age", "text"):
        left = name in ("action", "reason", "signal", "text")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for block in found.blocks:
        decision = block.decision
        ranks = [decision.ranks.get(signal) for signal in found.columns]
        table.add_row(
            str(decision.block),
            decision.action,
            decision.reason,
            decision.signal or "",
            "" if decision.score is None else f"{decision.score:.3f}",
            *("" if rank is None else str(rank + 1) for rank in ranks),
            str(block.age_blocks),
            Text(block.text),
            style="dim" if decision.action is Action.DROP else "",
        )
    table.caption = "below each signal the rank that it gives, 1 for its best; age in blocks"
    return table
