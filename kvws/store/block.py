"""What the block store takes and gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from xxhash import xxh3_128_digest

from kvws.store.storage import SECTOR_BYTES

PAGE_HASH_BYTES = 32
MAX_NUMBER = 2**63 - 1
MAX_ROW_FORMAT_BYTES = 120
FIRST_ROW_FORMAT = "mean-k/float32/v1"
"""Of the rows of stores whose manifests do not name it (rank format version 1)."""


@dataclass(frozen=True)
class StoreShape:
    """What all blocks of one store have in common.

    Attributes:
        payload_bytes: of one block at rest; whole sectors.
        row_bytes: of one block's row of the retrieval index.
        payload_format: how payloads are encoded: "exact", "int8", …; at most 16 bytes.
        row_format: what rows are made of; at most MAX_ROW_FORMAT_BYTES. Rows of another format,
            or size, can be made anew from the payloads.
    """

    payload_bytes: int
    row_bytes: int
    payload_format: str
    row_format: str

    def __post_init__(self) -> None:
        assert self.payload_bytes > 0, f"a payload of {self.payload_bytes} bytes"
        assert self.payload_bytes % SECTOR_BYTES == 0, "payloads are whole sectors"
        assert self.row_bytes > 0, f"a row of {self.row_bytes} bytes"
        assert len(self.payload_format.encode()) <= 16, f"format {self.payload_format!r}"
        format_bytes = len(self.row_format.encode())
        assert 0 < format_bytes <= MAX_ROW_FORMAT_BYTES, f"format {self.row_format!r}"


class SpaceBudget(Protocol):
    """Disk space that open stores share. A store takes what it allocates, from `open` to `close`.

    Called by several stores at once.
    """

    def take(self, size_bytes: int) -> None:
        """Raises DiskTierFull when fewer bytes are left; then nothing was taken."""
        ...

    def give_back(self, size_bytes: int) -> None: ...


@dataclass(frozen=True, slots=True)
class NewBlock:
    """A block to be stored.

    Attributes:
        number: what it is found by.
        page_hash: PAGE_HASH_BYTES that the store keeps beside it and never looks at.
        first_position: position that is baked into K, or -1: K is raw.
        payload: the shape's `payload_bytes`, in memory aligned to SECTOR_BYTES.
        row: the shape's `row_bytes`.
    """

    number: int
    page_hash: bytes
    first_position: int
    payload: memoryview
    row: memoryview

    def assert_fits(self, shape: StoreShape) -> None:
        """The store's limits and the shape's sizes are kept."""
        assert 0 <= self.number <= MAX_NUMBER, f"block number {self.number}"
        assert -1 <= self.first_position <= MAX_NUMBER, f"position {self.first_position}"
        assert len(self.page_hash) == PAGE_HASH_BYTES, f"a hash of {len(self.page_hash)} bytes"
        assert self.payload.nbytes == shape.payload_bytes, f"{self.payload.nbytes} bytes"
        assert self.row.nbytes == shape.row_bytes, f"a row of {self.row.nbytes} bytes"

    def stored_at(self, slot: int, generation: int) -> StoredBlock:
        """What an index says of it."""
        return StoredBlock(
            number=self.number,
            generation=generation,
            slot=slot,
            first_position=self.first_position,
            page_hash=self.page_hash,
            payload_digest=xxh3_128_digest(self.payload),
            row_digest=xxh3_128_digest(self.row),
        )


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A durable block.

    Attributes:
        slot: where it lies, counted over all segments.
        generation: counts puts over the life of the store.
        payload_digest, row_digest: xxh3_128; they detect accidents, not an attacker.
    """

    number: int
    generation: int
    slot: int
    first_position: int
    page_hash: bytes
    payload_digest: bytes
    row_digest: bytes


Reindex: TypeAlias = Callable[[Iterator[tuple[StoredBlock, memoryview]]], Iterator[bytes]]
"""Makes rows anew: takes blocks with their payloads, yields the row of each in the same order.

It may read some blocks ahead of the rows that it yields, and may keep payloads; a request's worth
of them, about 8 MiB, lies in one piece of memory.
"""
