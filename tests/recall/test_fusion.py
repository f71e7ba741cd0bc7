"""Fusion: one order of blocks out of what several signals say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvws.recall.fusion import NO_RANK, Ranking, fuse
from kvws.recall.recipe import Recipe, SignalName

LEXICAL, RECENCY, MEAN_K = SignalName.LEXICAL, SignalName.RECENCY, SignalName.MEAN_K


def recipe(stay_bonus: float = 0.0, **weights: float) -> Recipe:
    names = {SignalName(name.replace("_", "-")): weight for name, weight in weights.items()}
    return Recipe(names, rank_offset=5.0, stay_bonus=stay_bonus)


def fused(
    recipe: Recipe, *candidates: int, in_view: set[int] | None = None, **scores: Sequence[float]
) -> Ranking:
    by_signal = {SignalName(n.replace("_", "-")): np.array(s) for n, s in scores.items()}
    return fuse(recipe, by_signal, np.array(sorted(candidates)), in_view or set())


def order(ranking: Ranking) -> list[int]:
    return ranking.blocks.tolist()


def test_one_signal_alone_gives_its_own_order() -> None:
    ranking = fused(recipe(lexical=1), 0, 1, 2, 3, lexical=[0.1, 9.0, 0.2, 0.3])
    assert order(ranking) == [1, 3, 2, 0]
    assert ranking.ranks[LEXICAL].tolist() == [0, 1, 2, 3]


def test_a_block_gets_from_each_signal_its_weight_over_offset_and_rank() -> None:
    ranking = fused(recipe(lexical=0.5, recency=2), 0, 1, 2, lexical=[3, 2, 1], recency=[1, 2, 3])
    assert order(ranking) == [2, 1, 0]
    expected = [0.5 / 7 + 2 / 5, 0.5 / 6 + 2 / 6, 0.5 / 5 + 2 / 7]
    assert ranking.scores.tolist() == pytest.approx(expected)


def test_how_far_a_score_is_ahead_does_not_matter() -> None:
    near = fused(recipe(lexical=1, recency=1), 0, 1, 2, lexical=[3, 2, 1], recency=[1, 2, 3])
    far = fused(recipe(lexical=1, recency=1), 0, 1, 2, lexical=[1e9, 2, 1], recency=[1, 2, 3])
    assert order(near) == order(far) and near.scores.tolist() == far.scores.tolist()


def test_a_signal_has_nothing_to_say_for_what_it_scores_far_below_its_best() -> None:
    half = replace(recipe(lexical=1, recency=1), least_shares={LEXICAL: 0.5})
    ranking = fused(half, 0, 1, 2, lexical=[4.0, 8.0, 3.9], recency=[1, 2, 3])
    ranks = dict(zip(order(ranking), ranking.ranks[LEXICAL].tolist(), strict=True))
    assert ranks == {0: 1, 1: 0, 2: NO_RANK}
    assert NO_RANK not in ranking.ranks[RECENCY], "only the signal that the recipe names"


def test_its_best_is_that_of_the_candidates() -> None:
    half = replace(recipe(lexical=1), least_shares={LEXICAL: 0.5})
    ranking = fused(half, 0, 2, lexical=[4.0, 80.0, 3.0])
    assert ranking.ranks[LEXICAL].tolist() == [0, 1]


def test_where_it_scores_nothing_a_least_share_changes_nothing() -> None:
    half = replace(recipe(lexical=1, recency=1), least_shares={LEXICAL: 0.5})
    ranking = fused(half, 0, 1, lexical=[0.0, 0.0], recency=[1, 2])
    assert order(ranking) == [1, 0] and ranking.spoke == (RECENCY,)


def test_a_signal_has_nothing_to_say_for_what_it_scores_at_zero_or_below() -> None:
    ranking = fused(
        recipe(lexical=1, recency=1), 0, 1, 2, lexical=[0.0, 1.0, -1.0], recency=[1, 2, 3]
    )
    ranks = dict(zip(order(ranking), ranking.ranks[LEXICAL].tolist(), strict=True))
    assert ranks == {0: NO_RANK, 1: 0, 2: NO_RANK}
    scores = dict(zip(order(ranking), ranking.scores.tolist(), strict=True))
    assert scores == pytest.approx({0: 1 / 7, 1: 1 / 5 + 1 / 6, 2: 1 / 5})


def test_ties_go_to_the_newer_block_in_ranks_and_in_the_order() -> None:
    ranking = fused(recipe(lexical=1), 0, 1, 2, 3, lexical=[1.0, 2.0, 1.0, 2.0])
    assert order(ranking) == [3, 1, 2, 0]
    nothing_said = fused(recipe(lexical=1), 0, 1, 2, 3, lexical=[0.0] * 4)
    assert order(nothing_said) == [3, 2, 1, 0]


def test_a_signal_that_is_missing_is_as_if_the_recipe_had_none() -> None:
    with_more = fused(recipe(lexical=1, mean_k=9), 0, 1, 2, lexical=[1, 3, 2])
    without = fused(recipe(lexical=1), 0, 1, 2, lexical=[1, 3, 2])
    assert order(with_more) == order(without)
    assert with_more.scores.tolist() == without.scores.tolist()
    assert with_more.ranks.keys() == {LEXICAL}
    assert fused(recipe(lexical=1), 2, 0, 1).blocks.tolist() == [2, 1, 0]


def test_a_signal_that_the_recipe_does_not_name_is_not_heard() -> None:
    ranking = fused(recipe(lexical=1), 0, 1, lexical=[2, 1], mean_k=[1, 99])
    assert order(ranking) == [0, 1] and MEAN_K not in ranking.ranks


def test_only_candidates_are_ranked() -> None:
    ranking = fused(recipe(lexical=1), 1, 3, lexical=[9.0, 1.0, 9.0, 2.0, 9.0])
    assert order(ranking) == [3, 1] and ranking.ranks[LEXICAL].tolist() == [0, 1]
    nobody = fused(recipe(lexical=1), lexical=[9.0])
    assert order(nobody) == [] and nobody.spoke == ()


def test_what_is_in_the_view_stays_unless_a_rival_is_clearly_better() -> None:
    scores = {"lexical": [0.0, 1.0, 2.0]}
    assert order(fused(recipe(lexical=1), 1, 2, in_view={1}, **scores)) == [2, 1]
    assert order(fused(recipe(0.3, lexical=1), 1, 2, in_view={1}, **scores)) == [1, 2]
    assert order(fused(recipe(0.1, lexical=1), 1, 2, in_view={1}, **scores)) == [2, 1], "clearly"
    assert order(fused(recipe(0.3, lexical=1), 1, 2, in_view={1, 2}, **scores)) == [2, 1]


def test_the_signal_that_gives_most_is_told() -> None:
    ranking = fused(recipe(lexical=0.5, recency=1), 0, 1, 2, lexical=[1, 0, 9], recency=[1, 2, 0])
    loudest = {block: ranking.loudest(place) for place, block in enumerate(order(ranking))}
    assert loudest == {0: RECENCY, 1: RECENCY, 2: LEXICAL}
    ranks = {block: ranking.ranks_at(place) for place, block in enumerate(order(ranking))}
    assert ranks == {0: {LEXICAL: 1, RECENCY: 1}, 1: {RECENCY: 0}, 2: {LEXICAL: 0}}


def test_nobody_speaks_loudest_for_a_block_that_no_signal_ranks() -> None:
    ranking = fused(recipe(lexical=1), 0, 1, lexical=[0.0, 1.0])
    assert ranking.loudest(1) is None and ranking.ranks_at(1) == {}


def test_signals_that_rank_no_block_did_not_speak() -> None:
    ranking = fused(
        recipe(lexical=1, mean_k=1, recency=1), 0, 1, lexical=[0.0, 0.0], recency=[1, 2]
    )
    assert ranking.spoke == (RECENCY,)


def test_the_hits_are_the_best_blocks_as_far_as_anything_is_said_for_them() -> None:
    ranking = fused(recipe(lexical=1), 0, 1, 2, 3, lexical=[1.0, 0.0, 3.0, 2.0])
    assert [ranking.hits(count) for count in (0, 1, 2, 3, 4, 9)] == [
        [], [2], [2, 3], [2, 3, 0], [2, 3, 0], [2, 3, 0]
    ]  # fmt: skip
    assert all(type(block) is int for block in ranking.hits(3))
    assert fused(recipe(lexical=1), 0, 1, lexical=[0.0, 0.0]).hits(2) == []
    assert fused(recipe(lexical=1), lexical=[1.0]).hits(2) == []


RANKED = 4096
"""So many blocks at most does a signal rank."""


def shuffled(blocks: int) -> list[float]:
    """Scores from 1 on, no two alike."""
    return (1.0 + np.random.default_rng(5).permutation(blocks)).tolist()


def test_of_very_many_blocks_a_signal_ranks_the_best() -> None:
    scores = shuffled(RANKED + 900)
    ranking = fused(recipe(lexical=1), *range(len(scores)), lexical=scores)
    by_score = sorted(range(len(scores)), key=lambda block: -scores[block])
    assert order(ranking)[:RANKED] == by_score[:RANKED]
    assert order(ranking)[RANKED:] == sorted(by_score[RANKED:], reverse=True), "newest first"
    assert ranking.ranks[LEXICAL].tolist() == [*range(RANKED), *[NO_RANK] * 900]
    assert not ranking.scores[RANKED:].any()
    assert len(ranking.hits(len(scores))) == RANKED


def test_as_many_as_it_can_rank_are_all_ranked() -> None:
    ranking = fused(recipe(lexical=1), *range(RANKED), lexical=shuffled(RANKED))
    assert ranking.ranks[LEXICAL].tolist() == list(range(RANKED))


def test_of_very_many_blocks_the_newer_of_two_equals_is_ranked_higher() -> None:
    scores = [1.0 + block // 2 for block in range(RANKED + 900)]
    ranking = fused(recipe(lexical=1), *range(len(scores)), lexical=scores)
    assert order(ranking) == list(range(len(scores)))[::-1]
    assert ranking.ranks[LEXICAL].tolist()[: RANKED + 1] == [*range(RANKED), NO_RANK]


def test_what_scores_nothing_is_not_ranked_however_many_there_are() -> None:
    scores = [0.0] * (RANKED + 900)
    scores[7], scores[3000] = 0.5, 0.25
    ranking = fused(recipe(lexical=1), *range(len(scores)), lexical=scores)
    assert order(ranking)[:3] == [7, 3000, len(scores) - 1]
    assert ranking.hits(RANKED) == [7, 3000]


def test_a_block_too_low_for_one_signal_is_spoken_for_by_another() -> None:
    newest = RANKED + 899
    lexical, recency = [*range(newest + 1, 0, -1)], [*range(1, newest + 2)]
    ranking = fused(
        recipe(lexical=1, recency=2), *range(newest + 1), lexical=lexical, recency=recency
    )
    assert order(ranking)[:3] == [newest, newest - 1, newest - 2]
    assert ranking.ranks_at(0) == {RECENCY: 0}
    assert ranking.scores[0] == 2 / 5


@st.composite
def opinions(draw: st.DrawFn) -> tuple[Recipe, dict[SignalName, list[float]], list[int], set[int]]:
    blocks = draw(st.integers(1, 20))
    names = draw(st.lists(st.sampled_from(list(SignalName)), unique=True))
    weights = {name: draw(st.sampled_from([0.5, 1.0, 2.0])) for name in names}
    given = draw(st.lists(st.sampled_from(list(SignalName)), unique=True))
    some = st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0, 3.0])
    scores = {n: draw(st.lists(some, min_size=blocks, max_size=blocks)) for n in given}
    numbers = st.sets(st.integers(0, blocks - 1))
    candidates = draw(st.permutations(sorted(draw(numbers))))
    bonus = draw(st.sampled_from([0.0, 0.25]))
    return (
        Recipe(weights, rank_offset=5.0, stay_bonus=bonus), scores, list(candidates), draw(numbers)
    )  # fmt: skip


def fused_plainly(
    recipe: Recipe,
    by_signal: Mapping[SignalName, list[float]],
    candidates: list[int],
    in_view: set[int],
) -> dict[int, float]:
    """Scores by block, by the plainest code there is."""
    totals = dict.fromkeys(candidates, 0.0)
    for signal, weight in recipe.weights.items():
        scores = by_signal.get(signal, [])
        spoken_for = [block for block in candidates if scores and scores[block] > 0]
        spoken_for.sort(key=lambda block: (-scores[block], -block))
        for rank, block in enumerate(spoken_for):
            totals[block] += weight / (recipe.rank_offset + rank)
    return {b: t * (1 + recipe.stay_bonus * (b in in_view)) for b, t in totals.items()}


@settings(max_examples=300, deadline=None)
@given(opinions())
def test_fusing_is_adding_up_reciprocal_ranks(
    case: tuple[Recipe, dict[SignalName, list[float]], list[int], set[int]],
) -> None:
    recipe, scores, candidates, in_view = case
    arrays = {name: np.array(of_blocks, np.float32) for name, of_blocks in scores.items()}
    ranking = fuse(recipe, arrays, np.array(sorted(candidates), dtype=np.int64), in_view)
    expected = fused_plainly(*case)
    found = dict(zip(order(ranking), ranking.scores.tolist(), strict=True))
    assert found == pytest.approx(expected)
    assert list(found) == sorted(found, key=lambda block: (-found[block], -block))


def test_of_equals_at_the_end_of_what_a_signal_ranks_the_newer_count() -> None:
    ranking = fuse(Recipe({LEXICAL: 1.0}, 5.0), {LEXICAL: np.ones(5000)}, np.arange(5000))
    assert ranking.blocks[:2].tolist() == [4999, 4998]
    assert ranking.ranks[LEXICAL][:4096].tolist() == list(range(4096))
    assert set(ranking.ranks[LEXICAL][4096:].tolist()) == {NO_RANK}
