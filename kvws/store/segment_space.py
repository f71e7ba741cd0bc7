"""The space of an open store: slots to write to, made as they are needed, paid from the budget."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable

from kvws.errors import DiskTierFull
from kvws.store.block import SpaceBudget
from kvws.store.segment import MAX_SEGMENTS, SegmentLayout
from kvws.store.segment_files import SegmentFiles
from kvws.store.slots import SlotAllocator


class SegmentSpace:
    """Takes what its segments allocate from the budget, until `close`. Not thread-safe."""

    def __init__(
        self,
        files: SegmentFiles,
        layout: SegmentLayout,
        budget: SpaceBudget,
        segments: Collection[int],
        used: Collection[int],
    ) -> None:
        """Begin with what is on the disk. Segments that the budget does not hold stay in use.

        Args:
            segments: those that exist.
            used: slots that hold blocks.
        """
        self._files = files
        self._layout = layout
        self._budget = budget
        self._slots = SlotAllocator(layout.segment_blocks, segments, used)
        self._budgeted_segments = 0
        with contextlib.suppress(DiskTierFull):
            for _ in segments:
                budget.take(layout.segment_bytes)
                self._budgeted_segments += 1

    @property
    def segments(self) -> frozenset[int]:
        return self._slots.segments

    @property
    def allocated_bytes(self) -> int:
        """Disk space of the segments, used or not."""
        return len(self.segments) * self._layout.segment_bytes

    def take(self, count: int) -> list[int]:
        """Free slots in ascending order, from new segments if need be.

        Raises:
            DiskTierFull, OSError: no slot was taken.
        """
        while self._slots.free_slots < count:
            segment = self._slots.next_segment()
            if segment >= MAX_SEGMENTS:
                raise DiskTierFull(f"a store has {segment} segments, no more fit")
            self._budget.take(self._layout.segment_bytes)
            try:
                self._files.create(segment)
            except BaseException:
                self._budget.give_back(self._layout.segment_bytes)
                raise
            self._budgeted_segments += 1
            self._slots.add_segment(segment)
        return self._slots.take(count)

    def give_back(self, slots: Iterable[int]) -> None:
        """Slots are free again."""
        self._slots.give_back(slots)

    def remove_unused(self) -> int:
        """Delete segments without blocks; durable after a sync of the directory.

        Returns:
            How many there were.

        Raises:
            OSError: the disk's error; some files may be left.
        """
        unused = self._slots.unused_segments()
        # Whatever becomes of the files, nobody relies on them any more: a segment of the same
        # number replaces what is left of them.
        self._slots.remove_segments(unused)
        unbudgeted = len(self.segments) + len(unused) - self._budgeted_segments
        freed = max(0, len(unused) - unbudgeted)
        self._budgeted_segments -= freed
        self._budget.give_back(freed * self._layout.segment_bytes)
        for segment in unused:
            self._files.remove(segment)
        return len(unused)

    def check_integrity(self, used: Collection[int]) -> None:
        """Slots, segments and budget add up.

        Args:
            used: slots that hold blocks.
        """
        self._slots.check_integrity(used)
        assert 0 <= self._budgeted_segments <= len(self.segments)

    def close(self) -> None:
        """Give the budget back."""
        self._budget.give_back(self._budgeted_segments * self._layout.segment_bytes)
        self._budgeted_segments = 0
