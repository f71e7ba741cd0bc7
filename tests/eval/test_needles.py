"""Needles: the newest value is right, what is measured is what is in view, figures add up."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvws.blocks.key import BLOCK_TOKENS
from kvws.chat.render import ChatRenderer
from kvws.cli.main import main
from kvws.engine.platform_entry import declare_torchvision_ops
from kvws.eval.arms import (
    FULL,
    RANDOM,
    SINK_BLOCKS,
    SINK_WINDOW,
    blocks_of_budget,
    recent_blocks_of,
    recipes_of,
)
from kvws.eval.asking import RIGHT, Answered, Asking, Verdict
from kvws.eval.fact_templates import Template
from kvws.eval.facts import DEVELOPMENT, FactSet
from kvws.eval.intervals import ratio
from kvws.eval.needle_figures import as_json, by_arm, by_template, figures, of_full_and_right
from kvws.eval.needles import Haystack, haystacks_of
from kvws.eval.synthetic import synthetic_messages
from kvws.recall.recipe import AUTO
from kvws.replay.trace import Trace, TraceStep
from tests.eval.parrot import parrot

BUDGETS = (12, 25)


def a_template(name: str) -> Template:
    """Said and asked in the same words, so that whoever sees the fact can go on with its value."""
    return Template(
        name,
        "port",
        f"Know that the {name} of {{s}} is {{v}}.",
        (f"What is the {name} of {{s}}?", f"the {name} of {{s}} is"),
        (("Where does {s} listen?", f"the {name} of {{s}} is"),),
        f"Know that the {name} of {{s}} is {{v}}. It was changed.",
    )


TOY = FactSet(
    "toy",
    1,
    (a_template("port"), a_template("door"), a_template("gate")),
    ("quokka", "wombat", "numbat", "bilby", "dingo", "potoroo", "bettong", "kowari"),
    ("fern",),
    ("Ada",),
)


@pytest.fixture(scope="module")
def renderer(smollm2: Path) -> ChatRenderer:
    declare_torchvision_ops()
    return ChatRenderer(smollm2)


def a_trace(turns: int = 60) -> Trace:
    messages = tuple(synthetic_messages("needles", turns, ["sorter"]))
    return Trace("a session", "made", {"main": messages}, (TraceStep("main", 1),))


def haystack(renderer: ChatRenderer, *, seed: int = 0, facts: FactSet = TOY) -> Haystack:
    (found,) = haystacks_of(a_trace(), renderer, facts, per_trace=6, largest_percent=25, seed=seed)
    return found


def an_answer(**changes: object) -> Answered:
    answer = Answered(
        trace="t",
        episode=0,
        needle=0,
        template="port",
        kind="verbatim",
        is_update=False,
        budget_percent=12,
        arm=AUTO,
        verdict=Verdict(True, 1.0, True, None),
        full_exact=True,
        is_ranked=True,
        rank=0,
        blocks=2,
        blocks_in_view=2,
    )
    return replace(answer, **changes)  # pyright: ignore[reportArgumentType]


def test_an_older_value_stands_before_the_one_that_is_right(renderer: ChatRenderer) -> None:
    updates = 0
    for seed in range(4):
        for needle in haystack(renderer, seed=seed).needles:
            if needle.older is not None:
                updates += 1
                old, new = needle.older, needle.planted
                assert old.end_token <= new.first_token
                assert old.fact.subject == new.fact.subject and new.fact.is_update
                assert old.fact.value != new.fact.value
                assert {q.value for q in new.fact.questions} == {new.fact.value}
    assert updates >= 4


def test_needles_stand_in_the_history_where_every_view_has_to_find_them(
    renderer: ChatRenderer,
) -> None:
    found = haystack(renderer)
    blocks = len(found.tokens) // BLOCK_TOKENS
    recent = recent_blocks_of(blocks_of_budget(blocks, 25))
    assert len(found.needles) + found.left_out == 6 and len(found.needles) >= 4
    for needle in found.needles:
        span = needle.planted
        text = renderer.decode(found.tokens[span.first_token : span.end_token])
        assert text == span.fact.text
        assert span.blocks.start >= SINK_BLOCKS and span.blocks.stop <= blocks - recent
    depths = [needle.planted.first_token / len(found.tokens) for needle in found.needles]
    assert max(depths) - min(depths) > 0.4


def test_the_same_seed_hides_the_same_and_another_something_else(renderer: ChatRenderer) -> None:
    assert haystack(renderer).tokens == haystack(renderer).tokens
    assert haystack(renderer).tokens != haystack(renderer, seed=1).tokens


def test_a_short_session_hides_nothing(renderer: ChatRenderer) -> None:
    assert not haystacks_of(
        a_trace(turns=2), renderer, DEVELOPMENT, per_trace=4, largest_percent=25, seed=0
    )


@pytest.fixture(scope="module")
def answered(renderer: ChatRenderer) -> list[Answered]:
    """All answers of a model that knows exactly what is in view."""
    stack = haystack(renderer)
    asking = Asking(parrot(), renderer, None, stack)
    recipes = recipes_of(["lexical,recency"], with_profile=False)
    return [
        answer
        for needle in stack.needles
        for answer in asking.answers(needle, recipes, BUDGETS, "0")
    ]


def test_whoever_sees_the_fact_answers_with_its_newest_value(answered: list[Answered]) -> None:
    for answer in answered:
        if answer.arm in (FULL, RIGHT):
            assert answer.verdict.exact and answer.full_exact
            assert answer.blocks_in_view == answer.blocks and not answer.is_ranked
        if answer.blocks_in_view == answer.blocks:
            assert answer.verdict.exact and not answer.verdict.said_older
            assert answer.verdict.picked
        assert (answer.verdict.said_older is not None) == answer.is_update


def test_whoever_does_not_see_it_does_not_answer(answered: list[Answered]) -> None:
    blind = [a for a in answered if a.blocks_in_view == 0]
    assert {SINK_WINDOW, RANDOM} <= {a.arm for a in blind}
    assert not any(a.verdict.exact for a in blind)
    small = [a for a in answered if a.arm == SINK_WINDOW and a.budget_percent == 12]
    assert all(a.blocks_in_view == 0 for a in small)


def test_every_arm_is_asked_every_question_at_every_budget(answered: list[Answered]) -> None:
    arms = {a.arm for a in answered}
    assert {AUTO, "mean-k", "rotated-mean", "lexical", "succession", "lexical,recency"} <= arms
    needles = {a.needle for a in answered}
    assert len(answered) == len(arms) * len(needles) * 2 * len(BUDGETS)


def test_words_find_what_is_asked_in_the_facts_words(answered: list[Answered]) -> None:
    lexical = [a for a in answered if a.arm == "lexical" and a.kind == "verbatim"]
    assert figures(lexical).recall_8 == pytest.approx(1.0)


def test_recall_counts_ranks_and_what_was_not_chosen_counts_as_nothing() -> None:
    of = figures([an_answer(needle=n, rank=rank) for n, rank in enumerate([0, 2, 7, None])])
    assert (of.recall_1, of.recall_3, of.recall_8) == (0.25, 0.5, 0.75)
    assert of.reciprocal_rank == pytest.approx((1 + 1 / 3 + 1 / 8) / 4)
    given = figures([an_answer(is_ranked=False, rank=None)])
    assert given.recall_1 is None and given.reciprocal_rank is None


def test_views_count_facts_that_they_hold_whole_and_in_part() -> None:
    of = figures([an_answer(needle=n, blocks_in_view=n) for n in range(3)])
    assert of.all_in_view == pytest.approx(1 / 3) and of.some_in_view == pytest.approx(2 / 3)


def test_gated_figures_leave_out_what_the_full_context_cannot_answer() -> None:
    right, wrong = Verdict(True, 0.5, True, None), Verdict(False, 3.0, False, None)
    of = figures(
        [
            an_answer(needle=0, verdict=right),
            an_answer(needle=1, verdict=wrong),
            an_answer(needle=2, verdict=right, full_exact=False),
            an_answer(needle=3, verdict=wrong, full_exact=False),
            an_answer(needle=4, verdict=wrong, full_exact=False),
        ]
    )
    assert (of.questions, of.gated_questions) == (5, 2)
    assert of.exact.value == pytest.approx(0.4) and of.gated_exact.value == pytest.approx(0.5)


def test_older_values_are_counted_only_where_there_are_some() -> None:
    older, newer = Verdict(False, 2.0, False, True), Verdict(True, 2.0, True, False)
    answers = [an_answer(), an_answer(needle=1, verdict=older, is_update=True)]
    assert math.isnan(figures(answers[:1]).said_older.value)
    assert figures(answers).said_older.value == 1.0
    answers.append(an_answer(needle=2, verdict=newer, is_update=True))
    assert figures(answers).said_older.value == pytest.approx(0.5)
    assert by_arm(answers, "updated", 12)[AUTO].questions == 2
    assert by_arm(answers, "not updated", 12)[AUTO].questions == 1


def test_a_value_is_picked_if_it_is_likelier_than_what_is_said_of_others(
    renderer: ChatRenderer,
) -> None:
    for needle in haystack(renderer).needles:
        assert len(needle.rivals) == 2 and needle.planted.fact.value not in needle.rivals
    verdicts = [Verdict(False, 1.0, picked, None) for picked in (True, True, False)]
    answers = [an_answer(needle=n, verdict=verdict) for n, verdict in enumerate(verdicts)]
    assert figures(answers).picked.value == pytest.approx(2 / 3)


def test_answers_are_told_apart_by_arm_budget_kind_and_form() -> None:
    answers = [
        an_answer(),
        an_answer(arm=FULL),
        an_answer(budget_percent=25),
        an_answer(kind="paraphrased", template="hash"),
    ]
    assert {arm: of.questions for arm, of in by_arm(answers, "all", 12).items()} == {
        AUTO: 2,
        FULL: 1,
    }
    assert by_arm(answers, "paraphrased", 12).keys() == {AUTO}
    assert by_arm(answers, "all", 25)[AUTO].questions == 1
    assert by_template(answers, 12)["hash"][AUTO].questions == 1


def test_the_default_is_compared_with_full_context_and_right_block() -> None:
    exact = {FULL: (1, 1, 1, 1), RIGHT: (1, 1, 0, 0), AUTO: (1, 0, 0, 0)}
    answers = [
        an_answer(arm=arm, needle=n, verdict=Verdict(bool(is_right), 1.0, True, None))
        for arm, rights in exact.items()
        for n, is_right in enumerate(rights)
    ]
    shares = of_full_and_right(answers, "all", 12)
    assert shares[FULL].value == pytest.approx(0.25)
    assert shares[RIGHT].value == pytest.approx(0.5)


def test_an_interval_holds_its_value_and_narrows_with_more_units() -> None:
    few, many = ratio([1, 0, 1, 1], [1] * 4), ratio([1, 0, 1, 1] * 40, [1] * 160)
    assert few.value == many.value == 0.75
    assert few.low <= 0.75 <= few.high
    assert many.high - many.low < few.high - few.low
    assert ratio([2, 2, 2], [2, 2, 2]) == ratio([5], [5])
    assert math.isnan(ratio([0.0], [0.0]).value)


def test_a_report_holds_every_answer(answered: list[Answered]) -> None:
    report = as_json(answered, BUDGETS)
    assert len(report["answers"]) == len(answered)  # pyright: ignore[reportArgumentType]
    assert json.loads(json.dumps(report))["figures"]["25"]["verbatim"][FULL]["exact"]["value"] == 1


def written(folder: Path, turns: int) -> Path:
    """A session in the way of an OpenAI chat log."""
    messages = synthetic_messages("needles", turns, ["sorter"])
    path = folder / "session.json"
    path.write_text(
        json.dumps({"messages": [{"role": m.role, "content": m.content} for m in messages]})
    )
    return path


@pytest.mark.parametrize("put", [(), ("--orders",)])
def test_a_model_is_asked_from_the_command_line(
    put: tuple[str, ...], smollm2: Path, tmp_path: Path
) -> None:
    """The real one, one fact."""
    report = tmp_path / "report.json"
    result = CliRunner().invoke(
        main,
        [
            *("eval", "needles", str(written(tmp_path, 60)), "--model", str(smollm2)),
            *("--budgets", "12", "--per-trace", "1", "--json", str(report), *put),
        ],
    )
    assert result.exit_code == 0, result.output
    assert "12 % of the history" in result.output
    content = json.loads(report.read_text())
    assert content["orders"] == bool(put)
    of = content["figures"]["12"]["all"]
    assert of[FULL]["all_in_view"] == of[RIGHT]["all_in_view"] == 1.0
    assert of[SINK_WINDOW]["some_in_view"] == 0.0
    assert of[RIGHT]["nll"]["value"] < of[SINK_WINDOW]["nll"]["value"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "no session is as long as 2400 tokens"),
        (("--signals", "tarot"), "there is no signal 'tarot'"),
        (("--json", "no/such/folder.json"), "cannot be written"),
        (("--model", "no/such/model"), "no/such/model"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_a_hint(
    arguments: tuple[str, ...], says: str, smollm2: Path, tmp_path: Path
) -> None:
    trace = written(tmp_path, 3)
    result = CliRunner().invoke(main, ["eval", "needles", str(trace), *arguments])
    assert result.exit_code == 1, result.output
    assert says in result.output and "hint:" in result.output


def test_a_budget_is_a_percentage() -> None:
    for wrong in ("0", "100", "half", "12,"):
        result = CliRunner().invoke(main, ["eval", "needles", "x", "--budgets", wrong])
        assert result.exit_code == 2 and "Invalid value for '--budgets'" in result.output
