"""`--explain`: why the view of a step holds the blocks that it holds."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from kvws.cli.main import main
from kvws.errors import ConfigError
from kvws.limits import Limits
from kvws.observe.step_report import StepReport
from kvws.recall.plan import Action, Decision
from kvws.recall.recipe import FUSED, Recipe, SignalName, recipe_named
from kvws.recall.regions import Reason
from kvws.recall.selector import Selector
from kvws.recall.text.spelling import Spelling
from kvws.replay.explain import (
    Explanation,
    explain,
    print_explanation,
    require_steps,
    visible,
)
from kvws.replay.report import step_as_json
from kvws.replay.run import ReplayedStep, ReplayOptions, SessionReplay
from kvws.session.workspace import Workspace
from tests.recall.text.toys import byte_spelling, spell
from tests.replay.test_resume import IDENTITY, TRACE, TopicRenderer
from tests.step.session import LIMITS, in_loop
from tests.step.simulated_engine import SimulatedEngine

LEXICAL, RECENCY, CONTENT = SignalName.LEXICAL, SignalName.RECENCY, SignalName.CONTENT
SUCCESSION, MEAN_K = SignalName.SUCCESSION, SignalName.MEAN_K

RECIPE = Recipe({LEXICAL: 1.0, RECENCY: 0.5}, rank_offset=5.0)
SAID = "The tests are in tests/.\n\x1b[31mRun them with [bold]make[/bold] check.\tAll of them!"

REPORT = StepReport(
    "main",
    recalled=True,
    scored_blocks=1234,
    decisions=(
        Decision(0, Action.KEEP, Reason.SINK),
        Decision(1, Action.LOAD, Reason.SCORE, 0.2345, LEXICAL, {LEXICAL: 0, RECENCY: 11}),
        Decision(5, Action.KEEP, Reason.RECENT),
        Decision(2, Action.DROP, Reason.OUTSCORED),
    ),
    signals=("lexical", "recency"),
)


def workspace() -> Workspace:
    """Of six blocks of bytes; the second and the third say something."""
    log = Workspace("w")
    tokens = spell(32 * "a" + SAID.ljust(64) + 96 * "b")
    log.allocate((), tokens[: 6 * 32])
    return log


def explained(
    report: StepReport = REPORT,
    *,
    question: str = "Where are the tests?<|im_end|>\n<|im_start|>assistant\n",
    wanted: Recipe = RECIPE,
    recipe: Recipe = RECIPE,
    spelling: Spelling | None = None,
) -> Explanation:
    return explain(
        7,
        report,
        spell(question),
        workspace(),
        spelling or byte_spelling(),
        LIMITS,
        wanted=wanted,
        recipe=recipe,
    )


def printed(found: Explanation, width: int = 170) -> list[str]:
    output = StringIO()
    print_explanation(Console(file=output, width=width), found)
    return output.getvalue().splitlines()


def test_every_block_of_the_view_and_every_dropped_one_has_a_line() -> None:
    found = explained()
    assert [block.decision for block in found.blocks] == list(REPORT.decisions)
    assert [block.age_blocks for block in found.blocks] == [5, 4, 0, 3]
    assert [block.text for block in found.blocks][:2] == [
        32 * "a",
        "The tests are in tests/.\\n\\x1b[31mRu",
    ]


def test_the_table_shows_reason_signal_score_and_a_rank_from_one_per_signal() -> None:
    lines = printed(explained())
    (header,) = [line for line in lines if line.split()[:1] == ["block"]]
    assert header.split() == [
        "block", "action", "reason", "signal", "score", "lexical", "recency", "age", "text"
    ]  # fmt: skip
    (loaded,) = [line for line in lines if " load " in line]
    assert loaded.split()[:8] == ["1", "load", "score", "lexical", "0.234", "1", "12", "4"]
    assert loaded.rstrip().endswith("The tests are in tests/.\\n\\x1b[31mRu")
    (dropped,) = [line for line in lines if " drop " in line]
    assert dropped.split()[:4] == ["2", "drop", "outscored", "3"]
    assert "[bold]make[/bold]" in dropped, "what a block says is no markup"


def test_above_it_stand_question_budget_places_and_what_spoke() -> None:
    title, budget, *_ = printed(explained())
    assert title.startswith("step 7: ") and "Where are the tests?" in title
    assert "<|im" not in title, "its own words"
    assert "8 blocks (256 tokens), 6 of them for blocks that compete" in budget
    assert "chosen by lexical, recency" in budget
    assert budget.endswith("keys of 1,234 blocks scored")


def test_of_the_message_before_nothing_is_shown_as_the_question() -> None:
    before = "and so on.<|im_end|>\n"
    asked = "<|im_start|>user\nWhere are the tests?<|im_end|>\n<|im_start|>assistant\n"
    assert explained(question=before + asked).question == "Where are the tests?"


def test_a_hit_and_what_stands_beside_it_are_told_apart_and_take_places() -> None:
    hit = Decision(1, Action.LOAD, Reason.ANCHOR, 0.2345, LEXICAL, {LEXICAL: 0})
    beside = Decision(2, Action.LOAD, Reason.NEIGHBOUR, 0.1, None, {RECENCY: 3})
    found = explained(replace(REPORT, decisions=(REPORT.decisions[0], hit, beside)))
    assert found.places == LIMITS.budget_blocks - 1
    first, second = [line for line in printed(found) if " load " in line]
    assert first.split()[:5] == ["1", "load", "hit", "lexical", "0.234"]
    assert second.split()[:7] == ["2", "load", "beside", "a", "hit", "0.100", "4"]


def test_signals_that_were_asked_for_and_had_nothing_to_say_have_a_reason() -> None:
    recipe = FUSED.without([CONTENT])
    silent = explained(replace(REPORT, signals=("recency",)), wanted=FUSED, recipe=recipe).silent
    assert silent == {
        SignalName.ROTATED_MEAN: "it finds nothing, or such a question does not ask it",
        CONTENT: "the model has no profile",
        LEXICAL: "no block has the question's words",
        SUCCESSION: "there is no earlier turn",
    }
    bare = Spelling(byte_spelling().decode)
    silent = explained(wanted=FUSED, recipe=recipe, spelling=bare).silent
    assert silent[SUCCESSION] == "the chat template does not mark turns"
    assert LEXICAL not in silent
    lines = printed(explained(wanted=FUSED, recipe=recipe))
    assert "without content: the model has no profile" in lines


def test_a_step_that_did_not_recall_says_why() -> None:
    lines = printed(explained(StepReport("main")))
    assert lines == ["step 7: nothing was selected, everything fitted"]


def test_regions_larger_than_the_budget_leave_no_place() -> None:
    decisions = tuple(Decision(block, Action.KEEP, Reason.TASK) for block in range(6))
    limits = Limits(128, 256, 32, 32, 64)
    found = explain(
        1, StepReport("main", recalled=True, decisions=decisions), [], workspace(),
        byte_spelling(), limits, wanted=RECIPE, recipe=RECIPE,
    )  # fmt: skip
    assert found.places == 0 and found.budget_blocks == 4


def test_a_long_question_is_shown_by_both_its_ends_on_one_line() -> None:
    said = "Begin here.\n" + "x" * 5000 + "\nAnd now?"
    question = explained(question=said).question
    assert len(question) < 300 and "\n" not in question
    assert question.startswith("Begin here.\\nxxx") and question.endswith("xxx\\nAnd now?")


def test_what_does_not_print_is_spelled_out() -> None:
    assert visible("a\n\tb\x1b[0m\u202e\u00e4 \u4f60") == "a\\n\\tb\\x1b[0m\\u202e\u00e4 \u4f60"


def test_a_block_whose_tokens_are_gone_has_no_text() -> None:
    log = workspace()
    log.take_back([5])
    found = explain(1, REPORT, [], log, byte_spelling(), LIMITS, wanted=RECIPE, recipe=RECIPE)
    assert [block.text for block in found.blocks][2] == ""


def test_a_step_that_there_is_not_is_refused_with_the_range() -> None:
    require_steps([1, 6], 6)
    for number in (0, -1, 7):
        with pytest.raises(ConfigError, match=f"no step {number} ") as refused:
            require_steps([1, number], 6)
        assert "1 to 6" in refused.value.hint
    with pytest.raises(ConfigError) as refused:
        require_steps([1], 0)
    assert "no step was replayed" in refused.value.hint


def test_it_is_refused_before_anything_is_replayed(tmp_path: Path) -> None:
    trace = tmp_path / "session.json"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    trace.write_text(json.dumps({"messages": messages}))
    result = CliRunner().invoke(main, ["replay", str(trace), "--explain", "1", "--explain", "2"])
    lines = result.output.splitlines()
    assert result.exit_code == 1 and len(lines) == 2
    assert "no step 2" in lines[0] and "1 to 1" in lines[1]


@in_loop
async def test_a_replayed_step_is_explained_from_the_workspace() -> None:
    words = Spelling(lambda tokens: " ".join(f"w{token}" for token in tokens))
    recipe = recipe_named("lexical,mean-k")
    engine = SimulatedEngine(context_tokens=LIMITS.context_tokens)
    run = await SessionReplay.open(
        TRACE, TopicRenderer(), engine, LIMITS, ReplayOptions(),  # type: ignore[arg-type]
        selector=Selector(recipe, words), name="r", store=None, identity=IDENTITY, resume=False,
    )  # fmt: skip
    steps = [step async for step in run.steps()]
    assert [step.index for step in steps] == list(range(6))
    step = steps[-1]
    question = run.question(step)
    assert len(question) == step.report.query_tokens > 0
    found = explain(
        step.number, step.report, question, run.workspace, words, LIMITS,
        wanted=recipe, recipe=recipe,
    )  # fmt: skip
    assert found.recalled and found.question.startswith(f"w{question[0]} ")
    in_view = [b for b in found.blocks if b.decision.action is not Action.DROP]
    assert len(in_view) == step.report.view_blocks
    for block in found.blocks:
        first = run.workspace.block_tokens(block.decision.block)[0]
        assert block.text.startswith(f"w{first} ") and len(block.text) == 60
    assert step_as_json(step)["signals"] == list(step.report.signals)
    assert "mean-k" in step.report.signals


@in_loop
async def test_a_step_behind_one_that_was_left_out_has_its_own_question() -> None:
    options = ReplayOptions(max_tokens=32 * 26)
    engine = SimulatedEngine(context_tokens=LIMITS.context_tokens)
    run = await SessionReplay.open(
        TRACE, TopicRenderer(), engine, LIMITS, options,  # type: ignore[arg-type]
        selector=Selector(recipe_named("mean-k")), name="r", store=None, identity=IDENTITY,
        resume=False,
    )  # fmt: skip
    steps: list[ReplayedStep] = [step async for step in run.steps()]
    assert run.skipped_steps and [step.number for step in steps] == list(range(1, len(steps) + 1))
    for step in steps:
        prompt = TopicRenderer().tokens(TRACE.context(TRACE.steps[step.index]))
        assert step.report.prompt_tokens == len(prompt)
        assert run.question(step) == prompt[-step.report.query_tokens :]
