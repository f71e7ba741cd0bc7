"""Recipes: what a `--signals` value means, and what a question does to it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvws.errors import ConfigError
from kvws.recall.fusion import fuse
from kvws.recall.recipe import FUSED, Question, Recipe, SignalName, recipe_named

CONTENT, LEXICAL, MEAN_K = SignalName.CONTENT, SignalName.LEXICAL, SignalName.MEAN_K
SUCCESSION = SignalName.SUCCESSION

RECIPE = Recipe(
    {CONTENT: 1.0, LEXICAL: 0.5, MEAN_K: 4.0},
    rank_offset=5.0,
    anchor_weights={LEXICAL: 3.0, CONTENT: 1.5},
    anchor_share=1 / 16,
    short_words=10,
    stay_bonus=0.1,
)
ASKED, TOLD, OBSERVED = Question(10, asks=True), Question(10, asks=False), Question(11, asks=True)


def test_auto_is_the_default() -> None:
    assert recipe_named("auto") is FUSED
    for weights in (FUSED.weights, FUSED.anchor_weights):
        assert weights and all(weight > 0 for weight in weights.values())
        assert weights.keys() <= FUSED.weights.keys(), "what nobody scores has no weight"


@pytest.mark.parametrize("name", list(SignalName))
def test_a_single_signal_is_its_own_order_and_nothing_else(name: SignalName) -> None:
    recipe = recipe_named(name)
    assert list(recipe.weights) == [name]
    assert not recipe.newest_copies and not recipe.stay_bonus
    assert recipe.for_question(ASKED) == recipe and recipe.anchors(160, ASKED) == 0
    scores = np.array([0.2, 0.7, 0.1, 0.7, 0.3])
    ranking = fuse(recipe, {name: scores}, np.arange(5), in_view={0, 2})
    assert ranking.blocks.tolist() == [3, 1, 4, 0, 2]


def test_several_signals_are_fused_as_the_default_fuses_its_own() -> None:
    recipe = recipe_named("lexical, rotated-mean,mean-k")
    assert list(recipe.weights) == ["lexical", "rotated-mean", "mean-k"]
    for name in (LEXICAL, SignalName.ROTATED_MEAN):
        assert recipe.weights[name] == FUSED.weights[name]
    assert recipe.weights[MEAN_K] == 1.0, "which the default has not"
    assert recipe.newest_copies and recipe.stay_bonus == FUSED.stay_bonus
    assert recipe.rank_offset == FUSED.rank_offset


def test_a_signal_named_twice_counts_once() -> None:
    assert recipe_named("lexical,lexical") == recipe_named("lexical")


@pytest.mark.parametrize("text", ["lexcal", "", "lexical,", "lexical,auto", "LEXICAL"])
def test_what_is_no_signal_is_refused_with_those_that_there_are(text: str) -> None:
    with pytest.raises(ConfigError, match="there is no signal") as refused:
        recipe_named(text)
    assert "auto" in refused.value.hint and "rotated-mean" in refused.value.hint


def test_several_signals_are_given_anchors_by_those_of_them_that_find_any() -> None:
    assert recipe_named("lexical,recency").anchor_weights == {
        LEXICAL: FUSED.anchor_weights[LEXICAL]
    }
    assert recipe_named("lexical,recency").anchors(100, ASKED) == FUSED.anchors(100, ASKED)
    assert recipe_named("mean-k,recency").anchors(100, ASKED) == 0


def test_signals_of_ones_own_choice_are_fused_as_the_default_fuses_its_own() -> None:
    recipe = recipe_named("lexical,succession,mean-k")
    assert recipe.weights == {LEXICAL: 1.0, SUCCESSION: 2.0, MEAN_K: 1.0}
    assert recipe.question_least_shares == FUSED.question_least_shares


def test_of_what_asks_the_least_shares_are_those_for_questions() -> None:
    recipe = replace(RECIPE, least_shares={MEAN_K: 0.1}, question_least_shares={LEXICAL: 0.5})
    assert recipe.for_question(ASKED).least_shares == {LEXICAL: 0.5}
    assert recipe.for_question(ASKED).for_anchors().least_shares == {LEXICAL: 0.5}
    assert recipe.for_question(TOLD).least_shares == {MEAN_K: 0.1}
    observed = replace(recipe, short_words=9)
    assert observed.for_question(ASKED) == observed
    assert FUSED.for_question(Question(65, asks=True)).least_shares == {}


def test_only_what_is_short_and_asks_for_something_is_asked() -> None:
    assert RECIPE.is_asked(ASKED)
    assert not RECIPE.is_asked(TOLD) and not RECIPE.is_asked(OBSERVED)
    assert not recipe_named("lexical").is_asked(Question(1, asks=True)), "BM25 and nothing else"


def test_a_short_question_has_the_more_anchors_the_more_places_and_four_where_they_fit() -> None:
    found = [RECIPE.anchors(places, ASKED) for places in (0, 1, 79, 80, 160)]
    assert found == [1, 1, 4, 5, 10]


def test_what_asks_nothing_has_anchors_only_as_far_as_the_recipe_gives_it_some() -> None:
    assert RECIPE.anchors(160, TOLD) == 0
    for_told = replace(RECIPE, told_words=10)
    assert [for_told.anchors(places, TOLD) for places in (47, 48, 160)] == [2, 3, 10]
    assert for_told.anchors(160, Question(11, asks=False)) == 0
    assert FUSED.told_words == FUSED.short_words


def test_an_observation_longer_than_a_question_has_no_anchors() -> None:
    assert RECIPE.anchors(160, OBSERVED) == 0
    assert RECIPE.anchors(160, Question(11, asks=False)) == 0


def test_where_nothing_is_said_there_are_no_anchors() -> None:
    assert RECIPE.anchors(160, Question(0, asks=False)) == 0


def test_without_weights_for_anchors_there_are_none() -> None:
    none = Recipe({CONTENT: 1.0}, 5.0, anchor_share=1 / 16, short_words=10)
    assert none.anchors(160, ASKED) == 0


def test_anchors_are_fused_by_their_own_weights_wherever_the_blocks_stand_now() -> None:
    fused_for_anchors = RECIPE.for_anchors()
    assert fused_for_anchors.weights == {LEXICAL: 3.0, CONTENT: 1.5}
    assert fused_for_anchors.stay_bonus == 0.0
    assert fused_for_anchors.rank_offset == RECIPE.rank_offset


def test_some_signals_alone_are_those_in_every_fusion() -> None:
    some = RECIPE.only([LEXICAL, MEAN_K])
    assert some.weights == {LEXICAL: 0.5, MEAN_K: 4.0}
    assert some.anchor_weights == {LEXICAL: 3.0}
    assert (some.anchor_share, some.short_words, some.stay_bonus) == (1 / 16, 10, 0.1)


def test_leaving_signals_out_leaves_the_rest_of_every_fusion_as_it_is() -> None:
    rest = RECIPE.without([CONTENT])
    assert rest.weights == {LEXICAL: 0.5, MEAN_K: 4.0}
    assert rest.anchor_weights == {LEXICAL: 3.0}
    assert RECIPE.without([]) == RECIPE
    assert CONTENT in RECIPE.weights and CONTENT in RECIPE.anchor_weights, "it stays itself"


def test_where_no_signal_is_left_for_anchors_there_are_none() -> None:
    assert RECIPE.without([CONTENT, LEXICAL]).anchors(160, ASKED) == 0


def test_the_default_without_content_still_finds_anchors_by_words() -> None:
    rest = FUSED.without([CONTENT])
    for weights in (rest.weights, rest.anchor_weights):
        assert CONTENT not in weights and LEXICAL in weights
    assert rest.anchors(60, ASKED) == FUSED.anchors(60, ASKED) > 2
    assert rest.newest_copies == FUSED.newest_copies


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


def test_what_asks_nothing_has_no_more_anchors_than_bring_both_their_neighbours() -> None:
    assert [FUSED.anchors(places, TOLD) for places in (1, 3, 5, 6, 30)] == [1, 1, 1, 2, 5]


def test_of_what_asks_an_anchor_brings_one_neighbour_at_least() -> None:
    assert [FUSED.anchors(places, ASKED) for places in (1, 3, 5, 6, 8, 30)] == [1, 1, 2, 3, 4, 5]
