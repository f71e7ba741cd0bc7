"""Bringing the files of segments in line with what the index says, when a store is opened."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvws.store.block import StoredBlock
from kvws.store.segment import (
    SegmentLayout,
    is_of_another_row_set,
    segment_name,
    segment_of_name,
    segment_of_rows_name,
)
from kvws.store.storage import Storage


@dataclass(frozen=True)
class Recovery:
    """What `open` found broken and repaired.

    Attributes:
        cut_bytes: torn bytes at the end of the index: a put or drop that was under way.
        skipped_bytes: damaged or missing bytes within the index; what they said is lost.
        unknown_records: sound records of the index that this program does not know.
        dropped_blocks: blocks of the index whose place is not in the files any more.
    """

    cut_bytes: int
    skipped_bytes: int
    unknown_records: int
    dropped_blocks: int


def settle_segments(
    storage: Storage, directory: Path, layout: SegmentLayout, blocks: dict[int, StoredBlock]
) -> tuple[set[int], list[int]]:
    """Find the segments that can be used, and remove what a creation that was cut off left, as
    well as rows and indexes of other row sets: those of old, or of making rows anew that failed.

    The manifest is durable. Payloads are not read. Mutates `blocks`: those that lie outside the
    files are removed.

    Returns:
        The segments, whose free slots can all be written, and the numbers of the blocks removed.

    Raises:
        OSError: the disk's error.
    """
    names = storage.list_directory(directory)
    with_rows = _segments(segment_of_rows_name(name, layout.row_set) for name in names)
    sizes = {
        segment: _size_bytes(storage, directory / segment_name(segment))
        for segment in _segments(map(segment_of_name, names))
    }
    whole_slots = {segment: size // layout.slot_bytes for segment, size in sizes.items()}
    segment_blocks = layout.segment_blocks
    lost = [
        block.number
        for block in blocks.values()
        if block.slot % segment_blocks >= whole_slots.get(block.slot // segment_blocks, 0)
    ]
    for number in lost:
        del blocks[number]
    live = {layout.segment(block.slot) for block in blocks.values()}
    grown = {segment for segment, size in sizes.items() if size >= layout.payload_file_bytes}
    usable = live | (grown & with_rows)
    for segment in sizes.keys() - usable:
        storage.unlink(directory / segment_name(segment))
    for segment in with_rows - usable:
        storage.unlink(directory / layout.rows_name(segment))
    for segment in live - with_rows:
        storage.open_log(directory / layout.rows_name(segment), create=True).close()
    stale = [name for name in names if is_of_another_row_set(name, layout.row_set)]
    for name in stale:
        storage.unlink(directory / name)
    if stale or usable != sizes.keys() or usable != with_rows:
        storage.sync_directory(directory)
    return usable, lost


def _segments(parsed: Iterable[int | None]) -> set[int]:
    return {segment for segment in parsed if segment is not None}


def _size_bytes(storage: Storage, path: Path) -> int:
    with contextlib.closing(storage.open_log(path)) as file:
        return file.size()
