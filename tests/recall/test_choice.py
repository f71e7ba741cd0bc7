"""Choice: from a ranking to the blocks that take the places of a view."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence, Set

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvws.recall.choice import Chosen, choose
from kvws.recall.fusion import NO_RANK, Ranking
from kvws.recall.recipe import Recipe, SignalName
from kvws.recall.regions import Reason

CONTENT, LEXICAL = SignalName.CONTENT, SignalName.LEXICAL
SCORE, ANCHOR, NEIGHBOUR, NEWEST_COPY = (
    Reason.SCORE, Reason.ANCHOR, Reason.NEIGHBOUR, Reason.NEWEST_COPY
)  # fmt: skip


def ranked(best_first: Sequence[int], hits: Sequence[int] = ()) -> Ranking:
    """A fused order, which `lexical` has too, and the best by `content` in theirs."""
    order = list(best_first)
    content = [hits.index(block) if block in hits else NO_RANK for block in order]
    return Ranking(
        blocks=np.array(order, dtype=np.int64),
        scores=np.array([1 / (1 + place) for place in range(len(order))]),
        ranks={CONTENT: np.array(content), LEXICAL: np.arange(len(order))},
        weights={CONTENT: 0.6, LEXICAL: 1.0},
        rank_offset=1.0,
    )


def chosen(
    ranking: Ranking,
    *,
    most: int,
    anchors: Sequence[int] = (),
    fixed: Set[int] = frozenset(),
    line: Sequence[int] = (),
    copies: Mapping[int, tuple[int, ...]] | None = None,
) -> list[Chosen]:
    """`line`: in which blocks have neighbours. `copies`: newer blocks that say the same."""

    def neighbours(block: int) -> tuple[int, ...]:
        at = line.index(block) if block in line else len(line)
        return (*line[at + 1 : at + 2], *line[max(0, at - 1) : at])

    def newer_copy(block: int, among: Container[int], /) -> tuple[int, ...] | None:
        newer = (copies or {}).get(block, ())
        return newer if newer and all(copy in among for copy in newer) else None

    recipe = Recipe({CONTENT: 0.5, LEXICAL: 1.0}, 1.0, newest_copies=copies is not None)
    return choose(
        ranking,
        recipe,
        anchors=anchors,
        most=most,
        fixed=fixed,
        neighbours=neighbours,
        newer_copy=newer_copy,
    )


def told(found: list[Chosen]) -> list[tuple[int, Reason]]:
    return [(each.block, each.reason) for each in found]


def test_without_anchors_and_copies_the_fused_order_is_the_choice() -> None:
    found = chosen(ranked([4, 7, 1, 9]), most=3)
    assert told(found) == [(4, SCORE), (7, SCORE), (1, SCORE)]


def test_a_chosen_block_carries_its_score_its_ranks_and_who_gives_most() -> None:
    first, second = chosen(ranked([4, 7], hits=[7]), most=2)
    assert first == Chosen(4, SCORE, 1.0, {LEXICAL: 0}, LEXICAL)
    assert second == Chosen(7, SCORE, 0.5, {CONTENT: 0, LEXICAL: 1}, CONTENT)


def test_no_more_are_chosen_than_wanted_and_than_there_are() -> None:
    found = chosen(ranked([4, 7, 1, 9]), most=3)
    assert [each.block for each in found] == [4, 7, 1]
    assert chosen(ranked([4, 7]), most=0, anchors=[7]) == []
    assert len(chosen(ranked([4, 7]), most=12)) == 2
    found = chosen(ranked([4, 7, 1]), most=2, anchors=[7], line=range(10))
    assert told(found) == [(7, ANCHOR), (4, SCORE)]


def test_an_anchor_is_first_with_the_block_behind_and_then_the_one_before() -> None:
    found = chosen(ranked([1, 2, 9, 5, 4, 6], hits=[5, 9]), most=6, line=range(10), anchors=[5])
    assert told(found) == [
        (5, ANCHOR), (6, NEIGHBOUR), (4, NEIGHBOUR), (1, SCORE), (2, SCORE), (9, SCORE)
    ]  # fmt: skip
    assert found[0] == Chosen(5, ANCHOR, 1 / 4, {CONTENT: 0, LEXICAL: 3}, CONTENT)
    assert found[1].signal is None, "it came with another"
    assert found[1].ranks == {LEXICAL: 5} and found[1].score == 1 / 6


def test_anchors_come_in_the_order_they_are_given_and_so_do_their_neighbours_behind_them() -> None:
    found = chosen(ranked([1, 2, 8, 5, 4, 6, 9]), most=9, line=range(10), anchors=[5, 9])
    assert told(found) == [
        (5, ANCHOR), (9, ANCHOR), (6, NEIGHBOUR), (4, NEIGHBOUR), (8, NEIGHBOUR),
        (1, SCORE), (2, SCORE),
    ]  # fmt: skip


def test_an_anchor_beside_a_better_one_is_an_anchor_and_brings_its_own_neighbours() -> None:
    found = chosen(ranked([5, 6, 4, 7, 1]), most=9, line=range(10), anchors=[5, 6])
    assert told(found) == [
        (5, ANCHOR), (6, ANCHOR), (4, NEIGHBOUR), (7, NEIGHBOUR), (1, SCORE)
    ]  # fmt: skip


def test_anchors_and_their_neighbours_take_no_more_than_is_wanted() -> None:
    found = chosen(ranked([1, 5, 6, 4, 9]), most=3, line=range(10), anchors=[5, 9])
    assert told(found) == [(5, ANCHOR), (9, ANCHOR), (6, NEIGHBOUR)]


def test_neighbours_are_those_of_the_line_whatever_their_numbers() -> None:
    found = chosen(ranked([3, 8, 2, 7]), most=4, line=[2, 8, 3], anchors=[8])
    assert told(found) == [(8, ANCHOR), (3, NEIGHBOUR), (2, NEIGHBOUR), (7, SCORE)]


def test_a_neighbour_that_does_not_compete_takes_no_place() -> None:
    found = chosen(ranked([1, 5, 6]), most=3, fixed={4}, line=range(10), anchors=[5])
    assert told(found) == [(5, ANCHOR), (6, NEIGHBOUR), (1, SCORE)]


def test_best_by_content_is_no_anchor_by_itself() -> None:
    found = chosen(ranked([1, 5], hits=[5]), most=2, line=range(10))
    assert told(found) == [(1, SCORE), (5, SCORE)]


def test_the_newest_copies_of_a_block_take_its_place() -> None:
    found = chosen(ranked([2, 4, 7, 8]), most=3, copies={2: (7, 8)})
    assert told(found) == [(7, NEWEST_COPY), (8, NEWEST_COPY), (4, SCORE)]


def test_a_block_whose_copy_is_in_the_view_anyway_is_left_out() -> None:
    found = chosen(ranked([2, 4, 7]), most=3, fixed={9}, copies={2: (9,)})
    assert told(found) == [(4, SCORE), (7, SCORE)]


def test_a_copy_that_is_out_of_reach_replaces_nothing() -> None:
    found = chosen(ranked([2, 4]), most=2, copies={2: (9,)})
    assert told(found) == [(2, SCORE), (4, SCORE)]


def test_copies_that_have_their_places_already_do_not_take_another() -> None:
    found = chosen(ranked([7, 2, 3, 4]), most=4, copies={2: (7,), 3: (7,)})
    assert told(found) == [(7, SCORE), (4, SCORE)]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_every_choice_keeps_its_promises(data: st.DataObject) -> None:
    blocks = data.draw(st.permutations(range(16)), "blocks")
    fixed = set(blocks[: data.draw(st.integers(0, 4))])
    order = [b for b in blocks if b not in fixed][: data.draw(st.integers(0, 12))]
    anchors = data.draw(st.permutations(order))[: data.draw(st.integers(0, 3))]
    most = data.draw(st.integers(0, 16))
    numbers = st.integers(0, 15)
    newer = st.lists(numbers, min_size=1, max_size=3, unique=True).map(tuple)
    found = chosen(
        ranked(order),
        most=most,
        anchors=anchors,
        fixed=fixed,
        line=data.draw(st.lists(numbers, unique=True)),
        copies=data.draw(st.dictionaries(numbers, newer, max_size=4)),
    )
    chosen_blocks = [each.block for each in found]
    assert len(set(chosen_blocks)) == len(chosen_blocks) <= most, "at most once, and no more"
    assert set(chosen_blocks) <= set(order), "none that does not compete"
    of_anchors = [each.block for each in found if each.reason is ANCHOR]
    assert of_anchors == chosen_blocks[: len(of_anchors)] == anchors[:most], "anchors come first"
    reasons = [each.reason in (ANCHOR, NEIGHBOUR) for each in found]
    assert reasons == sorted(reasons, reverse=True), "what anchors bring is ahead of the order"
    of_order = [each.block for each in found if each.reason is SCORE]
    assert of_order == [block for block in order if block in of_order]
    assert all(type(block) is int for block in chosen_blocks)
