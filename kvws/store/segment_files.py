"""The files of a store's segments: made, removed, written and read."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvws.store.segment import FOOTER_BYTES, SegmentLayout, segment_name
from kvws.store.storage import File, Storage

_MAX_BUFFERS = 512
_MAX_WRITE_BYTES = 8 << 20


@dataclass
class _Handle:
    file: File
    users: int = 0


class SegmentFiles:
    """All segments of a directory. Thread-safe for disjoint slots."""

    def __init__(
        self, storage: Storage, directory: Path, layout: SegmentLayout, *, max_open: int = 128
    ) -> None:
        """Nothing is opened yet.

        Args:
            max_open: payload files kept open while nobody uses them.
        """
        self._storage = storage
        self._directory = directory
        self._layout = layout
        self._max_open = max_open
        self._handles: OrderedDict[int, _Handle] = OrderedDict()
        self._lock = threading.Lock()

    def create(self, segment: int) -> None:
        """Make a segment's files, durably, with all their payload bytes allocated.

        Raises:
            OSError: ENOSPC, …; no file is left, or one that the next `create` replaces.
        """
        self._remove_files(segment)
        payload_path, _ = self._paths(segment)
        try:
            payloads = self._storage.open_segment(
                payload_path, create_bytes=self._layout.payload_file_bytes
            )
            with contextlib.closing(payloads):
                payloads.sync()
            self.create_rows(segment)
            self._storage.sync_directory(self._directory)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error is the one to tell
                self._remove_files(segment)
            raise

    def create_rows(self, segment: int) -> None:
        """Make a segment's rows file at full length, durable but for its name."""
        _, path = self._paths(segment)
        with contextlib.closing(self._storage.open_log(path, create=True)) as rows:
            rows.truncate(self._layout.rows_file_bytes)
            rows.sync()

    def remove(self, segment: int) -> None:
        """Delete a segment that nobody uses; durable after a sync of the directory."""
        with self._lock:
            handle = self._handles.pop(segment, None)
        if handle is not None:
            assert handle.users == 0, f"segment {segment} is removed while it is used"
            handle.file.close()
        self._remove_files(segment)

    def write_payloads(
        self, slots: Sequence[int], payloads: Sequence[memoryview], footers: memoryview
    ) -> None:
        """Write payloads with their footers to ascending slots, and make them durable.

        Args:
            footers: one sector for each payload, aligned.
        """
        layout = self._layout
        at_once = max(1, min(_MAX_BUFFERS // 2, _MAX_WRITE_BYTES // layout.slot_bytes))
        for segment, indices in self._by_segment(slots):
            with self._payload_file(segment) as file:
                for run in self._runs(slots, indices, at_once):
                    buffers: list[memoryview] = []
                    for index in run:
                        begin = index * FOOTER_BYTES
                        buffers += payloads[index], footers[begin : begin + FOOTER_BYTES]
                    file.write(buffers, layout.payload_offset(slots[run.start]))
                file.sync()

    def write_rows(self, slots: Sequence[int], rows: Sequence[memoryview]) -> None:
        """Write rows to ascending slots, and make them durable."""
        for segment, indices in self._by_segment(slots):
            with contextlib.closing(self._rows_file(segment)) as file:
                for run in self._runs(slots, indices, _MAX_BUFFERS):
                    offset = self._layout.row_offset(slots[run.start])
                    file.write(rows[run.start : run.stop], offset)
                file.sync()

    def read_payloads(self, first_slot: int, buffers: Sequence[memoryview]) -> None:
        """Read adjacent slots, payload and footer by turns, in one call.

        Raises:
            EOFError: the file ends before.
            OSError: the disk's error.
        """
        with self._payload_file(self._layout.segment(first_slot)) as file:
            file.read(buffers, self._layout.payload_offset(first_slot))

    def read_rows(self, first_slot: int, rows: memoryview) -> None:
        """Read the rows of adjacent slots; raises as `read_payloads` does."""
        with contextlib.closing(self._rows_file(self._layout.segment(first_slot))) as file:
            file.read([rows], self._layout.row_offset(first_slot))

    def close(self) -> None:
        with self._lock:
            handles = list(self._handles.values())
            self._handles.clear()
        for handle in handles:
            handle.file.close()

    def _by_segment(self, slots: Sequence[int]) -> Iterator[tuple[int, range]]:
        """Segments of ascending slots, each with the range of its indices into `slots`."""
        segments = [self._layout.segment(slot) for slot in slots]
        for segment, group in itertools.groupby(range(len(slots)), segments.__getitem__):
            indices = list(group)
            yield segment, range(indices[0], indices[-1] + 1)

    def _runs(self, slots: Sequence[int], indices: range, max_blocks: int) -> Iterator[range]:
        """Runs of adjacent slots among those at `indices`."""
        part = slots[indices.start : indices.stop]
        for run in self._layout.adjacent(part, max_blocks):
            yield range(indices.start + run.start, indices.start + run.stop)

    def _paths(self, segment: int) -> tuple[Path, Path]:
        rows_path = self._directory / self._layout.rows_name(segment)
        return self._directory / segment_name(segment), rows_path

    def _remove_files(self, segment: int) -> None:
        for path in self._paths(segment):
            if self._storage.exists(path):
                self._storage.unlink(path)

    def _rows_file(self, segment: int) -> File:
        return self._storage.open_log(self._directory / self._layout.rows_name(segment))

    @contextlib.contextmanager
    def _payload_file(self, segment: int) -> Generator[File, None, None]:
        """The open file; it stays open for the next user, since opening may cost like a read."""
        with self._lock:
            handle = self._handles.get(segment)
            if handle is None:
                path = self._directory / segment_name(segment)
                handle = self._handles[segment] = _Handle(self._storage.open_segment(path))
            self._handles.move_to_end(segment)
            handle.users += 1
        try:
            yield handle.file
        finally:
            with self._lock:
                handle.users -= 1
                idle = self._pop_idle()
            for file in idle:
                file.close()

    def _pop_idle(self) -> list[File]:
        """Take the longest unused handles beyond the limit."""
        excess = len(self._handles) - self._max_open
        if excess <= 0:
            return []
        idle = [segment for segment, handle in self._handles.items() if not handle.users]
        return [self._handles.pop(segment).file for segment in idle[:excess]]
