"""The newest place of each hash: compared with a dictionary."""

from __future__ import annotations

import random
from array import array

from hypothesis import given
from hypothesis import strategies as st

from kvws.recall.text.newest import NONE, NewestArrivals

ALIKE = st.builds(
    lambda first, last: first << 56 | last << 8,
    st.sampled_from([0, 1, 255]),
    st.integers(0, 9),
)
"""Hashes that meet in few tables and slots."""


@given(st.lists(ALIKE | st.integers(0, (1 << 64) - 1)))
def test_the_newest_place_of_every_hash_is_known(arriving: list[int]) -> None:
    hashes = array("Q")
    newest = NewestArrivals(hashes)
    known: dict[int, int] = {}
    for place, hashed in enumerate(arriving):
        hashes.append(hashed)
        assert newest.enter(place) == known.get(hashed, NONE)
        known[hashed] = place
    assert {hashed: newest.of(hashed) for hashed in known} == known


def test_a_hash_that_never_came_has_none() -> None:
    hashes = array("Q")
    newest = NewestArrivals(hashes)
    assert newest.of(0) == NONE
    hashes.append(7 << 8)
    newest.enter(0)
    assert newest.of(15 << 8) == NONE, "it would stand in the same slot"


def test_tables_grow_with_what_they_hold() -> None:
    rng = random.Random(11)
    arriving = [rng.getrandbits(64) for _ in range(30_000)]
    hashes = array("Q", arriving)
    newest = NewestArrivals(hashes)
    for place in range(len(hashes)):
        newest.enter(place)
    assert [newest.of(hashed) for hashed in arriving] == list(range(len(arriving)))
