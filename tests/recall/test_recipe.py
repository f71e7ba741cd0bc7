"""Recipes: what a `--signals` value means."""

from __future__ import annotations

import numpy as np
import pytest

from kvws.errors import ConfigError
from kvws.recall.fusion import fuse
from kvws.recall.recipe import FUSED, Recipe, SignalName, recipe_named


def test_auto_is_the_default() -> None:
    assert recipe_named("auto") is FUSED
    assert all(weight > 0 for weight in FUSED.weights.values())


@pytest.mark.parametrize("name", list(SignalName))
def test_a_single_signal_is_its_own_order_and_nothing_else(name: SignalName) -> None:
    recipe = recipe_named(name)
    assert list(recipe.weights) == [name]
    assert not recipe.anchor_share and not recipe.newest_copies and not recipe.stay_bonus
    scores = np.array([0.2, 0.7, 0.1, 0.7, 0.3])
    ranking = fuse(recipe, {name: scores}, np.arange(5), in_view={0, 2})
    assert ranking.blocks.tolist() == [3, 1, 4, 0, 2]


def test_several_signals_are_fused_as_the_default_fuses_its_own() -> None:
    recipe = recipe_named("lexical, rotated-mean,mean-k")
    assert list(recipe.weights) == ["lexical", "rotated-mean", "mean-k"]
    for name in (SignalName.LEXICAL, SignalName.ROTATED_MEAN):
        assert recipe.weights[name] == FUSED.weights[name]
    assert recipe.weights[SignalName.MEAN_K] == 1.0, "which the default has not"
    assert recipe.newest_copies and recipe.stay_bonus == FUSED.stay_bonus
    assert recipe.rank_offset == FUSED.rank_offset


def test_a_signal_named_twice_counts_once() -> None:
    assert recipe_named("lexical,lexical") == recipe_named("lexical")


@pytest.mark.parametrize("text", ["lexcal", "", "lexical,", "lexical,auto", "LEXICAL"])
def test_what_is_no_signal_is_refused_with_those_that_there_are(text: str) -> None:
    with pytest.raises(ConfigError, match="there is no signal") as refused:
        recipe_named(text)
    assert "auto" in refused.value.hint and "rotated-mean" in refused.value.hint


def test_a_question_has_the_more_anchors_the_more_places_there_are() -> None:
    recipe = Recipe({SignalName.CONTENT: 1.0}, 5.0, anchor_share=1 / 16, anchored_words=10)
    assert [recipe.anchors(places, 10) for places in (1, 31, 32, 160)] == [1, 1, 2, 10]


def test_an_observation_longer_than_a_question_has_no_anchors() -> None:
    recipe = Recipe({SignalName.CONTENT: 1.0}, 5.0, anchor_share=1 / 16, anchored_words=10)
    assert recipe.anchors(160, 11) == 0
    assert recipe_named("content").anchors(160, 1) == 0, "nor has a signal of its own"


def test_leaving_signals_out_leaves_the_rest_as_it_is() -> None:
    rest = FUSED.without([SignalName.CONTENT, SignalName.MEAN_K])
    assert SignalName.CONTENT not in rest.weights
    assert rest.weights.items() <= FUSED.weights.items()
    assert len(rest.weights) == len(FUSED.weights) - 1
    assert rest.anchor_share == FUSED.anchor_share and rest.newest_copies == FUSED.newest_copies
    assert SignalName.CONTENT in FUSED.weights, "the default itself stays"


def test_the_ranks_keep_an_index_for_what_they_score_in_a_fixed_order() -> None:
    assert recipe_named("content,lexical,mean-k").rank_signals == ("mean-k", "content")
    assert recipe_named("lexical").rank_signals == ()


@pytest.mark.parametrize(
    ("signals", "needed"),
    [
        ("mean-k", False),
        ("recency", False),
        ("lexical", True),
        ("succession", True),
        ("mean-k,recency", True),
    ],
)
def test_text_is_read_where_a_signal_or_copies_need_it(signals: str, needed: bool) -> None:
    assert recipe_named(signals).needs_text == needed
