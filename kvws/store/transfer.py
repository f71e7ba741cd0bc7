"""Whole blocks to and from the files of segments, with every byte checked on the way back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from xxhash import xxh3_128_digest

from kvws.store.block import NewBlock, StoredBlock
from kvws.store.segment import (
    FOOTER_BYTES,
    SegmentLayout,
    aligned_buffer,
    encode_footer,
    is_footer,
)
from kvws.store.segment_files import SegmentFiles

MAX_READ_BLOCKS = 256
"""Of one request; it takes two buffers a block."""
_ROWS_READ_BYTES = 4 << 20


def write_blocks(
    files: SegmentFiles,
    layout: SegmentLayout,
    blocks: Sequence[NewBlock],
    places: Sequence[StoredBlock],
) -> None:
    """Write payloads, footers and rows, and make them durable.

    Args:
        places: for each block what the index will say of it; slots ascend.

    Raises:
        OSError: what the slots hold is unknown until they are written again.
    """
    slots = [place.slot for place in places]
    footers = aligned_buffer(len(blocks) * FOOTER_BYTES)
    for index, place in enumerate(places):
        begin = index * FOOTER_BYTES
        footers[begin : begin + FOOTER_BYTES] = encode_footer(place, layout.shape)
    files.write_payloads(slots, [block.payload for block in blocks], footers)
    files.write_rows(slots, [block.row for block in blocks])


def read_blocks(
    files: SegmentFiles,
    layout: SegmentLayout,
    places: Sequence[StoredBlock],
    into: Sequence[memoryview],
) -> list[int]:
    """Fill a buffer per block, with one request for each run of adjacent slots.

    Returns:
        Numbers of the blocks that are not what was written; their buffers hold anything.

    Raises:
        OSError: the disk's error.
    """
    corrupt: list[int] = []
    for run in layout.adjacent([place.slot for place in places], MAX_READ_BLOCKS):
        corrupt += _read_run(
            files, layout, places[run.start : run.stop], into[run.start : run.stop]
        )
    return corrupt


def read_rows(
    files: SegmentFiles,
    layout: SegmentLayout,
    places: Sequence[StoredBlock],
    damaged: list[int],
) -> Iterator[tuple[int, memoryview]]:
    """Rows of blocks in ascending slots, read in large pieces.

    Mutates `damaged`: the numbers of the rows that are left out, because they are not what was
    written or cannot be read.
    """
    for piece in _row_pieces(layout, places):
        for place, row in _rows_of(files, layout, piece):
            if row is not None and xxh3_128_digest(row) == place.row_digest:
                yield place.number, row
            else:
                damaged.append(place.number)


def _read_run(
    files: SegmentFiles,
    layout: SegmentLayout,
    places: Sequence[StoredBlock],
    into: Sequence[memoryview],
) -> list[int]:
    footers = aligned_buffer(len(places) * FOOTER_BYTES)
    footer_of = [footers[n * FOOTER_BYTES :][:FOOTER_BYTES] for n in range(len(places))]
    buffers = [buffer for pair in zip(into, footer_of, strict=True) for buffer in pair]
    try:
        files.read_payloads(places[0].slot, buffers)
    except EOFError:
        if len(places) == 1:
            return [places[0].number]
        return [
            number
            for n in range(len(places))
            for number in _read_run(files, layout, places[n : n + 1], into[n : n + 1])
        ]
    return [
        place.number
        for place, payload, footer in zip(places, into, footer_of, strict=True)
        if not is_footer(footer, place, layout.shape)
        or xxh3_128_digest(payload) != place.payload_digest
    ]


def _row_pieces(
    layout: SegmentLayout, places: Sequence[StoredBlock]
) -> Iterator[Sequence[StoredBlock]]:
    """Cut blocks in ascending slots into those whose rows one request reads, gaps included."""
    at_once = max(1, _ROWS_READ_BYTES // layout.shape.row_bytes)
    begin = 0
    for end in range(1, len(places) + 1):
        if (
            end == len(places)
            or places[end].slot - places[begin].slot >= at_once
            or layout.segment(places[end].slot) != layout.segment(places[begin].slot)
        ):
            yield places[begin:end]
            begin = end


def _rows_of(
    files: SegmentFiles, layout: SegmentLayout, piece: Sequence[StoredBlock]
) -> Iterator[tuple[StoredBlock, memoryview | None]]:
    """The rows of one piece; one by one if it cannot be read as a whole. None: cannot be read."""
    row_bytes = layout.shape.row_bytes
    first_slot = piece[0].slot
    memory = memoryview(bytearray((piece[-1].slot - first_slot + 1) * row_bytes))
    try:
        files.read_rows(first_slot, memory)
    except (OSError, EOFError):
        if len(piece) == 1:
            yield piece[0], None
            return
        for n in range(len(piece)):
            yield from _rows_of(files, layout, piece[n : n + 1])
        return
    for place in piece:
        begin = (place.slot - first_slot) * row_bytes
        yield place, memory[begin : begin + row_bytes]
