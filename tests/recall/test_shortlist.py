"""Which of many blocks are worth a close look."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvws.recall.recipe import SignalName
from kvws.recall.shortlist import RUN_BLOCKS, shortlist

LEXICAL, SUCCESSION, RECENCY = SignalName.LEXICAL, SignalName.SUCCESSION, SignalName.RECENCY
RUNS = 40
BLOCKS = RUNS * RUN_BLOCKS
PLACES = 64
EVERY = np.ones(BLOCKS, dtype=np.uint8)
NO_RUNS = np.zeros(RUNS, dtype=np.float32)
AGES = np.arange(1, BLOCKS + 1, dtype=np.float32)


def spoken_for(*blocks: int) -> np.ndarray:
    """Scores that fall from the first to the last."""
    scores = np.zeros(BLOCKS, dtype=np.float32)
    scores[list(blocks)] = np.arange(len(blocks), 0, -1)
    return scores


def listed(kept: np.ndarray) -> set[int]:
    return set(np.flatnonzero(kept).tolist())


def test_what_is_not_too_much_is_all_looked_at() -> None:
    candidates = EVERY.copy()
    candidates[PLACES:] = 0
    assert shortlist(candidates, {}, NO_RUNS, PLACES) is candidates


def test_the_most_wanted_runs_are_taken_whole_and_the_last_one_as_far_as_it_goes() -> None:
    runs = NO_RUNS.copy()
    runs[[7, 3, 20, 11, 30]] = 5, 4, 3, 2, 1
    kept = listed(shortlist(EVERY, {}, runs, 3 * RUN_BLOCKS + 5))
    wanted = [RUN_BLOCKS * run + n for run in (7, 3, 20) for n in range(RUN_BLOCKS)]
    assert kept == {*wanted, *range(RUN_BLOCKS * 11, RUN_BLOCKS * 11 + 5)}


def test_words_earlier_turns_and_age_have_their_shares() -> None:
    runs = NO_RUNS.copy()
    runs[0:2] = 9
    words = spoken_for(*range(600, 500, -1))
    turns = spoken_for(*range(300, 400))
    first = {LEXICAL: words, SUCCESSION: turns, RECENCY: AGES}
    kept = listed(shortlist(EVERY, first, runs, PLACES))
    assert set(range(600, 584, -1)) <= kept, "a quarter of the places"
    assert set(range(300, 308)) <= kept, "an eighth"
    assert set(range(BLOCKS - 8, BLOCKS)) <= kept, "an eighth"
    assert len(kept) == PLACES and set(range(2 * RUN_BLOCKS)) <= kept


def test_a_share_that_is_not_used_goes_to_the_runs() -> None:
    runs = NO_RUNS.copy()
    runs[5:9] = 9
    kept = listed(shortlist(EVERY, {LEXICAL: spoken_for(17)}, runs, PLACES))
    assert 17 in kept and len(kept & set(range(5 * RUN_BLOCKS, 9 * RUN_BLOCKS))) == PLACES - 1


def test_of_equal_words_the_newer_block_is_looked_at() -> None:
    words = np.where(np.arange(BLOCKS) % 2 == 0, 1, 0).astype(np.float32)
    kept = listed(shortlist(EVERY, {LEXICAL: words}, NO_RUNS, PLACES))
    assert {BLOCKS - 2 * n for n in range(1, PLACES // 4 + 1)} <= kept


def test_runs_that_nobody_scored_come_last() -> None:
    kept = listed(shortlist(EVERY, {}, np.full(2, -5.0, dtype=np.float32), PLACES))
    assert set(range(2 * RUN_BLOCKS)) <= kept and len(kept) == PLACES


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_it_is_so_many_of_the_candidates_and_none_else(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 200))
    numbers = st.lists(st.integers(0, 3), min_size=count, max_size=count)
    candidates = np.array(data.draw(numbers), dtype=np.uint8).clip(0, 1)
    first = {
        name: np.array(data.draw(numbers), dtype=np.float32)
        for name in data.draw(st.sets(st.sampled_from([LEXICAL, SUCCESSION, RECENCY])))
    }
    runs = np.array(data.draw(st.lists(st.floats(-2, 2), max_size=20)), dtype=np.float32)
    at_most = data.draw(st.integers(1, 200))
    kept = shortlist(candidates, first, runs, at_most)
    assert listed(kept) <= listed(candidates)
    assert kept.sum() == min(at_most, candidates.sum())
