"""Blocks whose content was read again later, wherever the block borders fell the second time.

A block is known by its shingles: every run of 8 tokens that ends in it. One in four is kept, by
its hash alone, so the same runs are kept in every copy. So few can only suggest a copy: of eight
that happen to be kept, three may be all that is alike. Whoever has the tokens compares them.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable, Sequence

import numpy as np

from kvws.recall.text.newest import NONE, NewestArrivals

SHINGLE_TOKENS = 8

TAIL_TOKENS = SHINGLE_TOKENS - 1
"""Tokens of the block before that the first shingles of a block begin with."""

_KEEP_ONE_IN = np.uint64(4)

_FEWEST = 3
"""Shingles that a copy shares with the block. Fewer may be chance."""

COPIED_SHARE = 0.75
"""Of the block's shingles that its copies hold together."""

_MOST_BLOCKS = 3
"""A copy that is not aligned lies in two blocks, one that was added to in three."""

_LOOK_BACK = 64
"""The newest holders of a shingle that are looked at: the rest of the copies are boilerplate."""

_FACTORS = np.array(
    [pow(0x9E3779B97F4A7C15, power, 1 << 64) for power in range(1, SHINGLE_TOKENS + 1)],
    dtype=np.uint64,
)
_MIX = np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(32)
_TOKEN_BYTES = array("I").itemsize


class CopyIndex:
    """Who holds which shingles. A block keeps about 8 shingles of 17 bytes, 8 bytes to find them,
    and each distinct shingle about 10 bytes in a table: in all about 220 bytes."""

    def __init__(self) -> None:
        # By kept shingle in order of arrival: hash, block, the same one's arrival before, whether
        # the same one arrived again.
        self._hashes = array("Q")
        self._blocks = array("I")
        self._before = array("i")
        self._came_again = bytearray()
        self._newest = NewestArrivals(self._hashes)
        # By block: its shingles are begin … end - 1.
        self._begins = array("i")
        self._ends = array("i")
        self._late: set[int] = set()  # that arrived after blocks with higher numbers

    def add(self, number: int, tokens_with_parent_tail: Sequence[int]) -> None:
        """Enter a block that is not there.

        Args:
            tokens_with_parent_tail: its tokens behind the last 7 of its parent, if it has one.
        """
        missing = number + 1 - len(self._begins)
        if missing > 0:
            self._begins.extend([0] * missing)
            self._ends.extend([0] * missing)
        else:
            self._late.add(number)
        self._begins[number] = len(self._hashes)
        for shingle in sampled_shingles(tokens_with_parent_tail):
            arrival = len(self._hashes)
            self._hashes.append(shingle)
            self._blocks.append(number)
            self._came_again.append(False)
            before = self._newest.enter(arrival)
            self._before.append(before)
            if before != NONE:
                self._came_again[before] = True
        self._ends[number] = len(self._hashes)

    def newer_copy(self, block: int, among: Container[int]) -> tuple[int, ...] | None:
        """The newer blocks that together say what a block says, oldest first.

        At most three of those in `among`, of equal ones the newest; None if they do not hold
        three quarters of the block's shingles.
        """
        if block >= len(self._begins):
            return None
        begin, end = self._begins[block], self._ends[block]
        fewest = max(_FEWEST, COPIED_SHARE * (end - begin))
        is_late = block in self._late
        if not is_late and self._came_again.count(True, begin, end) < fewest:
            return None
        held_by: dict[int, set[int]] = {}
        for shingle in range(begin, end):
            # What is newer arrived behind a block, unless it is late.
            for holder in self._holders(shingle, behind=NONE if is_late else shingle):
                if holder > block and holder in among:
                    held_by.setdefault(holder, set()).add(shingle)
        held: set[int] = set()
        copy: list[int] = []
        while held_by and len(copy) < _MOST_BLOCKS:
            best = max(held_by, key=lambda holder: (len(held_by[holder] - held), holder))
            if held_by[best] <= held:
                break
            held |= held_by.pop(best)
            copy.append(best)
        if len(held) < fewest:
            return None
        return tuple(sorted(copy))

    def _holders(self, shingle: int, behind: int) -> list[int]:
        """Blocks with a kept shingle that arrived behind an arrival, the latest first."""
        holders: list[int] = []
        arrival = self._newest.of(self._hashes[shingle])
        while arrival > behind and len(holders) < _LOOK_BACK:
            holders.append(self._blocks[arrival])
            arrival = self._before[arrival]
        return holders


def sampled_shingles(tokens: Sequence[int]) -> list[int]:
    """Distinct 64-bit hashes of the runs of 8 tokens that are kept, wherever they stand."""
    if len(tokens) < SHINGLE_TOKENS:
        return []
    hashes = np.correlate(np.array(tokens, dtype=np.uint64), _FACTORS, "valid")
    for _ in range(2):
        hashes ^= hashes >> _SHIFT
        hashes *= _MIX
    hashes ^= hashes >> _SHIFT
    kept: list[int] = hashes[hashes % _KEEP_ONE_IN == 0].tolist()
    return sorted(set(kept))


def share_held(
    tokens_with_parent_tail: Sequence[int], copies_with_parent_tails: Iterable[Sequence[int]]
) -> float:
    """The part of a block's shingles, all of them, that is in other blocks; 0 if it has none."""
    own = _shingles(tokens_with_parent_tail)
    left = own.difference(*map(_shingles, copies_with_parent_tails))
    return 1 - len(left) / len(own) if own else 0.0


def _shingles(tokens: Sequence[int]) -> set[bytes]:
    data, run_bytes = array("I", tokens).tobytes(), SHINGLE_TOKENS * _TOKEN_BYTES
    ends = range(run_bytes, len(data) + 1, _TOKEN_BYTES)
    return {data[end - run_bytes : end] for end in ends}
