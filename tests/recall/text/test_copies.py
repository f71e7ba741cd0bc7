"""What was read again later is found again, wherever the block borders fell."""

from __future__ import annotations

import random

import pytest

from kvws.recall.text.copies import TAIL_TOKENS, CopyIndex, sampled_shingles, share_held
from tests.recall.text.toys import BLOCK

ALL = range(1000)


def noise(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(50_000), k=count)


def read(tokens: list[int]) -> CopyIndex:
    index = CopyIndex()
    for number in range(len(tokens) // BLOCK):
        begin = number * BLOCK
        index.add(number, tokens[max(0, begin - TAIL_TOKENS) : begin + BLOCK])
    return index


FILE = noise(4 * BLOCK, seed=1)


@pytest.mark.parametrize("shift", range(BLOCK))
def test_a_copy_at_any_offset_is_found(shift: int) -> None:
    index = read(FILE + noise(64 + shift, seed=2) + FILE + noise(64, seed=3))
    first_copied = 6 + (shift > 0)
    for block in (1, 2, 3):
        copy = index.newer_copy(block, ALL)
        assert copy is not None, f"block {block}"
        place = 6 + block
        expected = {place, place + 1} if shift else {place}
        assert set(copy) <= expected and min(copy) >= first_copied - 1
        assert list(copy) == sorted(copy)


def test_which_shingles_are_kept_does_not_depend_on_where_they_stand() -> None:
    text = noise(60, seed=4)
    whole = set(sampled_shingles(text))
    assert whole and set(sampled_shingles(text[5:50])) <= whole
    halves = set(sampled_shingles(text[:33])) | set(sampled_shingles(text[33 - TAIL_TOKENS :]))
    assert halves == whole


def test_one_shingle_in_four_is_kept() -> None:
    kept = len(sampled_shingles(noise(8007, seed=5)))
    assert 1800 < kept < 2200
    assert sampled_shingles(noise(7, seed=5)) == []


def test_the_newest_copy_is_found() -> None:
    index = read(FILE + noise(BLOCK, seed=6) + FILE + noise(BLOCK, seed=7) + FILE)
    assert index.newer_copy(2, ALL) == (12,)
    assert index.newer_copy(2, range(10)) == (7,), "the newest that may be chosen"
    assert index.newer_copy(12, ALL) is None, "nothing newer than the newest"


def test_a_near_miss_is_no_copy() -> None:
    edited = [token if place % 10 else token + 1 for place, token in enumerate(FILE)]
    index = read(FILE + edited)
    assert all(index.newer_copy(block, ALL) is None for block in range(4))
    half = FILE[BLOCK : BLOCK + 16] + noise(16, seed=8)
    assert read(FILE + half + noise(64, seed=9)).newer_copy(1, ALL) is None


def test_a_copy_with_lines_put_in_is_found_in_its_parts() -> None:
    block = FILE[BLOCK : 2 * BLOCK]
    again = FILE[:BLOCK] + block[:16] + noise(40, seed=10) + block[9:] + FILE[2 * BLOCK :]
    copy = read(FILE + again + noise(64, seed=11)).newer_copy(1, ALL)
    assert copy is not None and len(copy) in (2, 3)


def test_scattered_boilerplate_is_no_copy() -> None:
    block = FILE[2 * BLOCK :]
    scattered = [
        token
        for part in range(5)
        for token in [*block[5 * part : 5 * part + 12], *noise(BLOCK - 12, seed=12)]
    ]
    assert read(FILE + scattered).newer_copy(2, ALL) is None


def test_a_block_of_one_repeated_token_has_too_few_shingles_to_tell() -> None:
    assert read([7] * 10 * BLOCK).newer_copy(2, ALL) is None


@pytest.mark.parametrize("late", range(9))
def test_a_copy_is_found_whichever_block_was_read_late(late: int) -> None:
    tokens = FILE + noise(BLOCK, seed=14) + FILE
    index = CopyIndex()
    for number in [*(n for n in range(9) if n != late), late]:
        begin = number * BLOCK
        index.add(number, tokens[max(0, begin - TAIL_TOKENS) : begin + BLOCK])
    assert [index.newer_copy(block, ALL) for block in (1, 2, 3)] == [(6,), (7,), (8,)]
    assert all(index.newer_copy(block, ALL) is None for block in range(4, 9))


def test_an_unknown_block_has_no_copy() -> None:
    assert read(FILE).newer_copy(99, ALL) is None


def test_the_share_that_others_hold_is_of_all_shingles() -> None:
    block, other = FILE[:39], noise(39, seed=13)
    assert share_held(block, [block]) == 1
    assert share_held(block, [other]) == 0
    assert share_held(block, [block[:23], block[31:]]) == pytest.approx((16 + 1) / 32)
    assert share_held(block, []) == 0
    assert share_held(block[:7], [block]) == 0
