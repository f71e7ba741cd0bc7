"""Rows that are made of nothing but a payload, in any format: what a store can make anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import blake2b
from itertools import islice

from kvws.store.block import Reindex, StoredBlock, StoreShape

BLOCKS_AHEAD = 3


def row_of(payload: bytes | memoryview, shape: StoreShape) -> bytes:
    """Other bytes in each format; of at most 64."""
    text = shape.row_format.encode()
    return blake2b(text + b"\0" + bytes(payload), digest_size=shape.row_bytes).digest()


def reindex_to(
    shape: StoreShape, on_block: Callable[[StoredBlock], None] = lambda block: None
) -> Reindex:
    """Reads some blocks ahead of the rows that it yields."""

    def reindex(blocks: Iterator[tuple[StoredBlock, memoryview]]) -> Iterator[bytes]:
        while batch := list(islice(blocks, BLOCKS_AHEAD)):
            for block, payload in batch:
                on_block(block)
                yield row_of(payload, shape)

    return reindex


def no_reindex(blocks: Iterator[tuple[StoredBlock, memoryview]]) -> Iterator[bytes]:
    """For stores whose rows are as wanted."""
    raise AssertionError("rows are made anew")
