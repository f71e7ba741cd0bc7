"""What recorded agents looked back at: was it in view when they did?

Two things in a recording tell without a doubt what a turn needed: text that it repeats word for
word, and files that it reads although the session has shown them. Each counts at a budget if no
whole copy lies in a view of the first and the newest blocks: a window answers it with nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kvws.blocks.key import BLOCK_TOKENS
from kvws.eval.arms import SINK_BLOCKS, blocks_of_budget
from kvws.eval.copied import CopySpan, copy_spans, coverage, covered_tokens
from kvws.eval.episodes import Episode, Turn
from kvws.eval.file_reads import reads_file
from kvws.eval.history import History
from kvws.eval.points import LEAST_HISTORY_TOKENS, QUESTION_TOKENS
from kvws.eval.reader import Reader
from kvws.eval.views import regions_of, views_of
from kvws.recall.profile import Profile
from kvws.recall.recipe import Recipe
from kvws.recall.text.spelling import Spelling
from kvws.session.ingest import ahead_of_query, window

Want = Literal["copied", "read again"]

_ANSWER_SHARE = 0.5


@dataclass(frozen=True)
class Wanted:
    """What a step looks back at.

    Attributes:
        want: it repeats the text, or reads a file that holds it.
        spans: in tokens of the turn, or of what its tools answered.
        is_beyond_compaction: a copy stands before the agent's history was replaced.
    """

    want: Want
    spans: tuple[CopySpan, ...]
    is_beyond_compaction: bool


@dataclass(frozen=True)
class Step:
    """A step of an episode that looks back at something.

    Attributes:
        history: tokens of the history, whole blocks; the question is what follows up to the turn.
        wanted: at least one thing.
    """

    turn: Turn
    history: int
    wanted: tuple[Wanted, ...]

    @property
    def history_blocks(self) -> int:
        return self.history // BLOCK_TOKENS

    def at_stake(self, wanted: Wanted, percent: int) -> list[CopySpan]:
        """Spans with no whole copy in a view of that budget that a window would have."""
        blocks = self.history_blocks
        newest = window(tuple(range(blocks)), SINK_BLOCKS, blocks_of_budget(blocks, percent))
        view = frozenset(newest)
        return [s for s in wanted.spans if not coverage(s, view, blocks).is_whole]


@dataclass(frozen=True)
class Found:
    """How much of what a step looks back at one view holds.

    Attributes:
        trace, format, episode: where the step is.
        prompt_tokens: of the step, in its episode.
        want: what it looks back at.
        is_beyond_compaction: a copy stands before the agent's history was replaced.
        budget_percent: size of the view, of the history.
        arm: how it was chosen.
        spans: that count at this budget, at least one.
        spans_in_view: of those, with a whole copy in view.
        blocks: of the copy of each that the view holds the largest share of.
        blocks_in_view: of those.
    """

    trace: str
    format: str
    episode: int
    prompt_tokens: int
    want: Want
    is_beyond_compaction: bool
    budget_percent: int
    arm: str
    spans: int
    spans_in_view: int
    blocks: int
    blocks_in_view: int


def steps_of(episode: Episode) -> list[Step]:
    """Every step with 1,024 tokens of history that looks back at something."""
    found: list[Step] = []
    for turn in episode.turns:
        line = turn.new_begin // BLOCK_TOKENS * BLOCK_TOKENS
        history = line + ahead_of_query(turn.begin - line, QUESTION_TOKENS)
        if history < LEAST_HISTORY_TOKENS:
            continue
        wanted = _wanted(episode, turn)
        if wanted:
            found.append(Step(turn, history, wanted))
    return found


def found_in_views(
    reader: Reader,
    spelling: Spelling,
    profile: Profile | None,
    episode: Episode,
    steps: Sequence[Step],
    recipes: Mapping[str, Recipe],
    budgets: Sequence[int],
    seed: int,
    on_step: Callable[[], None] = lambda: None,
) -> Iterator[Found]:
    """Choose views at every step with something at stake. Reads the episode once, if there is any.

    Args:
        steps: of the episode.
        on_step: called when a step is done.
    """
    asking = [s for s in steps if any(s.at_stake(w, p) for w in s.wanted for p in budgets)]
    if not asking:
        return
    reading = reader.read(episode.tokens[: asking[-1].turn.begin], with_queries=True)
    assert reading.queries is not None  # asked for
    for step in asking:
        tokens = episode.tokens[: step.history]
        key_values = reading.key_values.before(step.history)
        history = History(reader, tokens, key_values, spelling, profile)
        question = episode.tokens[step.history : step.turn.begin]
        queries = reading.queries[:, step.history : step.turn.begin]
        for percent in budgets:
            at_stake = [(w, spans) for w in step.wanted if (spans := step.at_stake(w, percent))]
            if not at_stake:
                continue
            budget_blocks = blocks_of_budget(history.blocks, percent)
            regions = regions_of(history, budget_blocks)
            scores = history.scores(queries, question, history.candidates(regions))
            chance = f"{seed} {episode.trace} {episode.number} {step.turn.begin} {percent}"
            views = views_of(history, question, scores, regions, budget_blocks, recipes, chance)
            for arm, view in views:
                for wanted, spans in at_stake:
                    yield _found(episode, step, wanted, spans, percent, arm, view.blocks)
        on_step()


def _wanted(episode: Episode, turn: Turn) -> tuple[Wanted, ...]:
    earlier = episode.tokens[: turn.begin]
    wanted: list[Wanted] = []
    copied = copy_spans(earlier, episode.tokens[turn.begin : turn.end])
    if copied:
        wanted.append(Wanted("copied", tuple(copied), _is_beyond(copied, turn)))
    answer = episode.tokens[turn.end : turn.answered_end]
    if answer and reads_file(turn.message):
        known = copy_spans(earlier, answer)
        if covered_tokens(known) >= _ANSWER_SHARE * len(answer):
            wanted.append(Wanted("read again", tuple(known), _is_beyond(known, turn)))
    return tuple(wanted)


def _is_beyond(spans: Sequence[CopySpan], turn: Turn) -> bool:
    """Whether a copy stands before the compaction that came before a turn, and none behind it."""
    border = turn.compacted_at
    return border is not None and any(span.sources[-1] < border for span in spans)


def _found(
    episode: Episode,
    step: Step,
    wanted: Wanted,
    spans: Sequence[CopySpan],
    percent: int,
    arm: str,
    view: Sequence[int],
) -> Found:
    blocks = frozenset(view)
    covered = [coverage(span, blocks, step.history_blocks) for span in spans]
    return Found(
        trace=episode.trace,
        format=episode.format,
        episode=episode.number,
        prompt_tokens=step.turn.begin,
        want=wanted.want,
        is_beyond_compaction=wanted.is_beyond_compaction,
        budget_percent=percent,
        arm=arm,
        spans=len(spans),
        spans_in_view=sum(each.is_whole for each in covered),
        blocks=sum(each.blocks for each in covered),
        blocks_in_view=sum(each.in_view for each in covered),
    )
