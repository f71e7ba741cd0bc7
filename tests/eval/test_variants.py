"""Variants of the default: each changes one thing, at the same steps, and is compared in pairs."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence, Set
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from rich.console import Console

from kvws.blocks.key import BLOCK_TOKENS
from kvws.errors import ConfigError
from kvws.eval.arms import SINK_BLOCKS, blocks_of_budget, recent_blocks_of
from kvws.eval.fidelity import Judgement
from kvws.eval.points import Cut, Episode, Point
from kvws.eval.reader import KeyValues
from kvws.eval.variants import (
    DEFAULT,
    QUESTION,
    STEP_BEFORE,
    Asking,
    Thirds,
    Variant,
    layers_of,
    some_of,
    variants_of,
)
from kvws.eval.variants_measured import Shown, VariantResult, measure_variants
from kvws.eval.variants_report import variant_figures, variants_json, variants_table
from kvws.recall.choice import Chosen
from kvws.recall.recipe import FUSED, Recipe, SignalName
from kvws.recall.regions import Regions
from tests.eval.unigrams import VOCABULARY, Unigrams, WordHistory

BASE = Variant(DEFAULT, "", FUSED)


def changes(variant: Variant) -> set[str]:
    """What of a variant is not the default's."""
    of_variant = {f.name for f in fields(Variant)} - {"name", "topic", "recipe"}
    changed = {name for name in of_variant if getattr(variant, name) != getattr(BASE, name)}
    of_recipe = {f.name for f in fields(Recipe)}
    return changed | {n for n in of_recipe if getattr(variant.recipe, n) != getattr(FUSED, n)}


def test_the_first_is_the_default_and_every_other_differs_from_it_in_one_thing() -> None:
    default, *others = variants_of()
    assert default == BASE
    weights = {"weights", "anchor_weights"}
    for variant in others:
        changed = changes(variant)
        one_signal = variant.topic == "signals" and changed <= weights
        of_current_view = changed <= {"follows", "stay_bonus"}
        assert changed and (len(changed) == 1 or one_signal or of_current_view), variant.name


def test_variants_can_be_told_apart_by_name_and_no_topic_is_a_name() -> None:
    variants = variants_of()
    names = [variant.name for variant in variants]
    assert len(set(names)) == len(names)
    assert not {variant.topic for variant in variants} & set(names)


def test_every_signal_is_left_out_once() -> None:
    left_out = [FUSED.weights.keys() - variant.recipe.weights.keys() for variant in variants_of()]
    assert [names for names in left_out if names] == [{signal} for signal in FUSED.weights]


def test_a_model_without_profile_is_measured_without_content_and_its_own_layers() -> None:
    for variant in variants_of(with_profile=False):
        assert SignalName.CONTENT not in variant.recipe.weights
        assert variant.rotated_thirds is None
    assert "without lexical" in {variant.name for variant in variants_of(with_profile=False)}


def test_some_are_chosen_by_name_and_by_topic_and_the_default_always() -> None:
    variants = variants_of()
    assert some_of(variants, []) == variants
    chosen = some_of(variants, ["no anchors", "fusion"])
    assert [variant.name for variant in chosen] == [
        *(DEFAULT, "rank offset 2", "rank offset 20", "rank offset 60", "no anchors")
    ]


def test_what_is_no_variant_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="no variant 'anchor'") as refused:
        some_of(variants_of(), ["anchor"])
    assert "no anchors" in refused.value.hint and "which tokens ask" in refused.value.hint


def test_who_asks_is_counted_from_the_question() -> None:
    assert QUESTION.of(1000, 1100) == range(1000, 1100)
    assert Asking(last_tokens=32).of(1000, 1100) == range(1068, 1100)
    assert Asking(last_tokens=32).of(1000, 1010) == range(1000, 1010)
    assert Asking(ahead_tokens=256).of(1000, 1100) == range(744, 1100)
    assert STEP_BEFORE.of(1000, 1100) == range(872, 1000)


@pytest.mark.parametrize("layers", [3, 30, 32])
def test_three_thirds_are_all_layers(layers: int) -> None:
    thirds = [layers_of((third, third + 1), layers) for third in range(3)]
    assert all(thirds)
    assert tuple(layer for third in thirds for layer in third) == layers_of((0, 3), layers)
    assert layers_of((0, 3), layers) == tuple(range(layers))


BLOCKS = 60
POINT = Point(2, BLOCKS * BLOCK_TOKENS, BLOCKS * BLOCK_TOKENS + 10, BLOCKS * BLOCK_TOKENS + 40)


def episode() -> Episode:
    """Its words are drawn around one that changes as it goes on."""
    chance = random.Random(7)
    tokens = [(place // 200 + chance.randrange(12)) % VOCABULARY for place in range(POINT.end)]
    return Episode("made up", "test", "main", 0, tuple(tokens), (POINT,))


class Listener(WordHistory):
    """Remembers what it was asked."""

    def __init__(self, tokens: Sequence[int], key_values: KeyValues) -> None:
        super().__init__(tokens, key_values)
        self.scored: list[tuple[tuple[int, ...], int | None, int]] = []
        self.chosen: list[tuple[tuple[int, ...], frozenset[int], dict[SignalName, Any]]] = []

    def scores(
        self,
        queries: torch.Tensor,
        question: Sequence[int],
        candidates: Any,
        begins_at: int | None = None,
    ) -> dict[SignalName, Any]:
        self.scored.append((tuple(question), begins_at, queries.shape[1]))
        return {SignalName.ROTATED_MEAN: self, SignalName.CONTENT: self}

    def choose(
        self,
        recipe: Recipe,
        question: Sequence[int],
        scores: dict[SignalName, Any],
        regions: Regions,
        budget_blocks: int,
        in_view: Set[int] = frozenset(),
    ) -> list[Chosen]:
        self.chosen.append((tuple(question), frozenset(in_view), scores))
        return super().choose(recipe, question, scores, regions, budget_blocks)


class OnlyRotated(Listener):
    """Scored by rotated-mean alone."""

    def scores(self, *args: Any, **kw: Any) -> dict[SignalName, Any]:
        return {SignalName.ROTATED_MEAN: super().scores(*args, **kw)[SignalName.ROTATED_MEAN]}


class Measured:
    """Some variants, measured at one point with views of a quarter."""

    def __init__(self, *variants: Variant) -> None:
        self.reader = Unigrams()
        self.histories: dict[Thirds | None, Listener] = {}
        cut = Cut("made up", (episode(),), {})
        measured = [BASE, *variants]
        results = measure_variants([cut], self.reader, self._history, measured, [25])
        self.shown = results[0].shown[25]
        self.window = results[0].window[25]

    def _history(
        self, tokens: Sequence[int], key_values: KeyValues, thirds: Thirds | None
    ) -> Listener:
        made = (OnlyRotated if thirds else Listener)(tokens, key_values)
        self.histories[thirds] = made
        return made

    @property
    def default(self) -> Listener:
        return self.histories[None]


def words(positions: range) -> tuple[int, ...]:
    return episode().tokens[positions.start : positions.stop]


def test_the_default_is_asked_by_the_question_behind_no_view() -> None:
    measured = Measured()
    question = words(range(POINT.history, POINT.prompt))
    assert (question, POINT.history, 10) in measured.default.scored
    assert (question, frozenset[int]()) in [asked[:2] for asked in measured.default.chosen]
    assert measured.shown[DEFAULT].judgement.turn_kl < measured.window.turn_kl


def test_other_tokens_ask_by_their_own_queries_at_their_own_positions() -> None:
    asking = Asking(ahead_tokens=256)
    measured = Measured(replace(BASE, name="more", asking=asking))
    positions = range(POINT.history - 256, POINT.prompt)
    assert (words(positions), positions.start, 266) in measured.default.scored
    assert words(positions) in [asked[0] for asked in measured.default.chosen]
    assert measured.shown["more"] != measured.shown[DEFAULT]


def test_what_the_step_before_asked_loads_nothing_and_the_question_does() -> None:
    measured = Measured(replace(BASE, name="stale", asking=STEP_BEFORE))
    assert measured.shown["stale"].loaded == 0
    assert 0 < measured.shown[DEFAULT].loaded < 1


def test_a_variant_that_follows_is_told_the_view_of_the_step_before() -> None:
    measured = Measured(replace(BASE, name="follows", follows=True))
    budget = blocks_of_budget(BLOCKS, 25)
    fixed = measured.default.regions(SINK_BLOCKS, recent_blocks_of(budget)).fixed
    (in_view,) = {asked[1] for asked in measured.default.chosen if asked[1]}
    assert len(in_view) == budget and in_view >= set(fixed)


def test_other_layers_are_scored_by_a_history_of_their_own_and_the_rest_by_the_usual_one() -> None:
    measured = Measured(replace(BASE, name="last third", rotated_thirds=(2, 3)))
    own = measured.histories[2, 3]
    assert not own.chosen, "blocks are chosen once, from all scores together"
    scores = measured.default.chosen[-1][2]
    assert scores[SignalName.ROTATED_MEAN] is own
    assert scores[SignalName.CONTENT] is measured.default


def test_a_view_that_is_partly_computed_anew_says_the_same_in_the_same_order() -> None:
    before = Measured().reader.reads
    measured = Measured(replace(BASE, name="half", anew_share=0.5))
    assert measured.reader.reads == before + 1, "it is another context"
    # This model counts what it has seen, whether it was moved or read again.
    expected = measured.shown[DEFAULT].judgement.turn_kl
    assert measured.shown["half"].judgement.turn_kl == pytest.approx(expected, rel=1e-4)


def test_variants_that_choose_the_same_view_are_judged_once() -> None:
    before = Measured().reader.reads
    others = [replace(BASE, name=f"same {number}") for number in range(3)]
    measured = Measured(*others)
    assert measured.reader.reads == before
    assert {shown.judgement for shown in measured.shown.values()} == {
        measured.shown[DEFAULT].judgement
    }


def result(
    number: int, own: tuple[float | None, float], default: tuple[float | None, float]
) -> VariantResult:
    def judged(kl: tuple[float | None, float]) -> Judgement:
        return Judgement(kl[0], kl[1], 0.5, 0.1)

    shown = {
        DEFAULT: Shown(judged(default), 0.25),
        "other": Shown(judged(own), 0.5 * number),
    }
    window = judged((None if own[0] is None else 2.0, 1.0))
    return VariantResult(f"one@{number}", "one", "test", 40, {25: window}, {25: shown})


RESULTS = [
    result(0, (1.0, 0.6), (0.5, 0.5)),
    result(1, (None, 0.2), (None, 0.4)),
]


def test_a_variant_recovers_what_the_window_loses_and_is_compared_with_the_default() -> None:
    found = variant_figures(RESULTS, 25, "other")
    assert found.turn.recovered == pytest.approx(1 - 0.8 / 2)
    assert found.turn.gain.value == pytest.approx(0.05)
    assert (found.turn.gain.low, found.turn.gain.high) == (
        pytest.approx(-0.1), pytest.approx(0.2)
    )
    assert found.question is not None
    assert found.question.recovered == pytest.approx(0.5), "of the pairs that are known"
    assert found.question.gain.value == pytest.approx(-0.25)
    assert found.loaded == pytest.approx(0.25)


def test_the_default_gains_nothing_over_itself() -> None:
    gain = variant_figures(RESULTS, 25, DEFAULT).turn.gain
    assert (gain.value, gain.low, gain.high) == (0, 0, 0)


def test_a_table_shows_every_variant_with_its_topic() -> None:
    variants = [BASE, replace(BASE, name="other", topic="fusion")]
    console = Console(width=200, record=True)
    console.print(variants_table(RESULTS, variants, 25, 0))
    text = console.export_text()
    assert "views of 25 % of the history (n=2)" in text
    (row,) = (line for line in text.splitlines() if "other" in line)
    assert row.split()[0] == "fusion"
    for shown in ("0.50", "-0.25 [-0.25, -0.25]", "0.60", "+0.05 [-0.10, +0.20]"):
        assert shown in row


def test_a_report_holds_figures_and_points_and_survives_json() -> None:
    variants = [BASE, replace(BASE, name="other")]
    report = json.loads(json.dumps(variants_json(RESULTS, variants, [25], 0)))
    assert [variant["name"] for variant in report["variants"]] == [DEFAULT, "other"]
    assert [point["name"] for point in report["points"]] == ["one@0", "one@1"]
    figures = report["figures"]["25"]
    assert figures["other"]["turn"]["recovered"] == pytest.approx(0.6)
    assert figures[DEFAULT]["loaded"] == pytest.approx(0.25)
