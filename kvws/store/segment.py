"""Slot arithmetic of segments, the footer that ends each slot, and the names of files.

    segment-NNNNNN.kv    slot 0: payload | footer (one sector), slot 1: payload | footer, …
    rows-NNNNNN.mk       slot 0: row, slot 1: row, …

Slots are counted over all segments: segment = slot // segment_blocks. All sizes come from the
shape, none from the files.

Rows that were made anew, with the index that names them, are a *row set* of their own beside the
segments: rows-NNNNNN.1.mk and index.1.log, then .2, … The manifest says which one counts.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from xxhash import xxh3_128_digest

from kvws.store.block import StoredBlock, StoreShape
from kvws.store.storage import SECTOR_BYTES

FOOTER_BYTES = SECTOR_BYTES
MAX_SEGMENTS = 1_000_000
_SEGMENT_NAME = re.compile(r"segment-([0-9]{6})\.kv")
_ROWS_NAME = re.compile(r"rows-([0-9]{6})(?:\.([1-9][0-9]*))?\.mk")
_INDEX_NAME = re.compile(r"index(?:\.([1-9][0-9]*))?\.log")
_FOOTER_MAGIC = b"kvf\x01"
# magic, number, generation, slot, first_position, payload_bytes, row_bytes,
# page_hash, payload_digest, row_digest, payload_format
_FOOTER = struct.Struct("<4sQQQqQQ32s16s16s16s")


@dataclass(frozen=True)
class SegmentLayout:
    """Where things lie in the files of one store.

    Attributes:
        segment_blocks: slots of a segment.
        row_set: how often rows were made anew.
    """

    shape: StoreShape
    segment_blocks: int
    row_set: int = 0

    @property
    def slot_bytes(self) -> int:
        return self.shape.payload_bytes + FOOTER_BYTES

    @property
    def payload_file_bytes(self) -> int:
        return self.segment_blocks * self.slot_bytes

    @property
    def rows_file_bytes(self) -> int:
        return self.segment_blocks * self.shape.row_bytes

    @property
    def segment_bytes(self) -> int:
        """Of both files of a segment."""
        return self.payload_file_bytes + self.rows_file_bytes

    @property
    def index_name(self) -> str:
        return f"index{self._row_set_part}.log"

    def rows_name(self, segment: int) -> str:
        return f"rows-{segment:06}{self._row_set_part}.mk"

    @property
    def _row_set_part(self) -> str:
        return f".{self.row_set}" if self.row_set else ""

    def segment(self, slot: int) -> int:
        return slot // self.segment_blocks

    def payload_offset(self, slot: int) -> int:
        return slot % self.segment_blocks * self.slot_bytes

    def row_offset(self, slot: int) -> int:
        return slot % self.segment_blocks * self.shape.row_bytes

    def adjacent(self, slots: Sequence[int], max_blocks: int) -> Iterator[range]:
        """Cut a sequence of slots into runs that lie one behind the other in one segment.

        Returns:
            Ranges of indices into `slots`.
        """
        begin = 0
        for end in range(1, len(slots) + 1):
            if (
                end == len(slots)
                or end - begin == max_blocks
                or slots[end] != slots[end - 1] + 1
                or slots[end] % self.segment_blocks == 0
            ):
                yield range(begin, end)
                begin = end


def segment_name(segment: int) -> str:
    return f"segment-{segment:06}.kv"


def segment_of_name(name: str) -> int | None:
    """The segment whose payloads a file of this name holds."""
    match = _SEGMENT_NAME.fullmatch(name)
    return int(match[1]) if match else None


def segment_of_rows_name(name: str, row_set: int) -> int | None:
    """The segment whose rows, of that row set, a file of this name holds."""
    match = _ROWS_NAME.fullmatch(name)
    return int(match[1]) if match and int(match[2] or 0) == row_set else None


def is_of_another_row_set(name: str, row_set: int) -> bool:
    """Whether a file of this name holds rows of another row set, or their index."""
    rows, index = _ROWS_NAME.fullmatch(name), _INDEX_NAME.fullmatch(name)
    if rows:
        return int(rows[2] or 0) != row_set
    return index is not None and int(index[1] or 0) != row_set


def encode_footer(block: StoredBlock, shape: StoreShape) -> bytes:
    """The sector that is written behind a block's payload: everything that is known of it."""
    return _encode_footer(block, shape, shape.row_bytes, block.row_digest)


def is_footer(sector: memoryview, block: StoredBlock, shape: StoreShape) -> bool:
    """Whether a sector may stand behind a block's payload.

    All of it is compared with what the index says, but for size and digest of the row: they are
    those of the row that the block was put with, and rows may have been made anew since.
    """
    fields = _FOOTER.unpack_from(sector)
    return bytes(sector) == _encode_footer(block, shape, fields[6], fields[9])


def _encode_footer(
    block: StoredBlock, shape: StoreShape, row_bytes: int, row_digest: bytes
) -> bytes:
    fields = _FOOTER.pack(
        _FOOTER_MAGIC,
        block.number,
        block.generation,
        block.slot,
        block.first_position,
        shape.payload_bytes,
        row_bytes,
        block.page_hash,
        block.payload_digest,
        row_digest,
        shape.payload_format.encode(),
    )
    return (fields + xxh3_128_digest(fields)).ljust(FOOTER_BYTES, b"\0")


def aligned_buffer(size_bytes: int) -> memoryview:
    """Zeroed memory that begins on a sector boundary."""
    return memoryview(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
