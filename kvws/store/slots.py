"""Which slots are free."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable


class SlotAllocator:
    """Hands out the lowest free slots, so that blocks put together lie together.

    Takes and gives back in O(log slots). Not thread-safe.
    """

    def __init__(
        self, segment_blocks: int, segments: Iterable[int], used: Collection[int]
    ) -> None:
        """Begin with what is on the disk.

        Args:
            segments: those that exist.
            used: slots that hold blocks, all of them in these segments.
        """
        self._segment_blocks = segment_blocks
        self._segments = set(segments)
        self._used_of = Counter(slot // segment_blocks for slot in used)
        not_free = set(used)
        self._free = [
            slot
            for segment in sorted(self._segments)
            for slot in self._slots_of(segment)
            if slot not in not_free
        ]
        self._lowest_gap = 0

    @property
    def segments(self) -> frozenset[int]:
        return frozenset(self._segments)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take free slots, lowest first, in ascending order; so many must be free."""
        assert count <= len(self._free), f"{count} slots of {len(self._free)}"
        slots = [heapq.heappop(self._free) for _ in range(count)]
        self._used_of.update(slot // self._segment_blocks for slot in slots)
        return slots

    def give_back(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._used_of[slot // self._segment_blocks] -= 1
            heapq.heappush(self._free, slot)

    def next_segment(self) -> int:
        """The lowest number that no segment has."""
        while self._lowest_gap in self._segments:
            self._lowest_gap += 1
        return self._lowest_gap

    def add_segment(self, segment: int) -> None:
        assert segment not in self._segments, f"segment {segment} exists"
        self._segments.add(segment)
        for slot in self._slots_of(segment):
            heapq.heappush(self._free, slot)

    def unused_segments(self) -> list[int]:
        return sorted(segment for segment in self._segments if not self._used_of[segment])

    def remove_segments(self, segments: Collection[int]) -> None:
        """Forget segments none of whose slots is used."""
        gone = set(segments)
        assert not any(self._used_of[segment] for segment in gone), "a removed segment is used"
        self._segments -= gone
        self._free = [slot for slot in self._free if slot // self._segment_blocks not in gone]
        heapq.heapify(self._free)
        self._lowest_gap = min(self._lowest_gap, min(gone, default=self._lowest_gap))

    def check_integrity(self, used: Collection[int]) -> None:
        """Used slots = those of the blocks; used and free slots = those of the segments."""
        taken, free = set(used), set(self._free)
        assert len(used) == len(taken), "two blocks lie in one slot"
        assert len(self._free) == len(free), "a slot is free twice"
        assert not taken & free, "a slot is used and free"
        slots = {slot for segment in self._segments for slot in self._slots_of(segment)}
        assert taken | free == slots, "a slot is lost, or lies outside the segments"
        counted = Counter(slot // self._segment_blocks for slot in taken)
        assert +self._used_of == counted, "a segment's count is wrong"

    def _slots_of(self, segment: int) -> range:
        return range(segment * self._segment_blocks, (segment + 1) * self._segment_blocks)
