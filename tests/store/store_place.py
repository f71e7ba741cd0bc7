"""A place to open a block store in, blocks to put there, and the check of all that it answers."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

from kvws.errors import DiskTierFull
from kvws.store.block import NewBlock, Reindex, StoredBlock, StoreShape
from kvws.store.block_store import BlockStore
from kvws.store.log import AppendLog
from kvws.store.posix import PosixStorage
from kvws.store.segment import FOOTER_BYTES, aligned_buffer
from tests.store.rows import reindex_to, row_of

SHAPE = StoreShape(8192, 40, "exact", "mean-k/float32/v1")
OTHER_ROWS = StoreShape(8192, 56, "exact", "other/v1")
SEGMENT_BLOCKS = 4
SEGMENT_BYTES = SEGMENT_BLOCKS * (SHAPE.payload_bytes + FOOTER_BYTES + SHAPE.row_bytes)


class Budget:
    """Counts; refuses beyond a number of segments."""

    def __init__(self, segments: int = 1000) -> None:
        self.limit_bytes = segments * SEGMENT_BYTES
        self.taken_bytes = 0

    def take(self, size_bytes: int) -> None:
        if self.taken_bytes + size_bytes > self.limit_bytes:
            raise DiskTierFull("spent")
        self.taken_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        self.taken_bytes -= size_bytes
        assert self.taken_bytes >= 0


class Place:
    """A directory to open a store in again and again."""

    def __init__(self, path: Path) -> None:
        self.storage = PosixStorage(path)
        self.path = path / "rank-0"
        self.budget = Budget()

    def open(
        self, shape: StoreShape = SHAPE, *, rank: int = 0, reindex: Reindex | None = None
    ) -> BlockStore:
        return BlockStore.open(
            self.storage,
            self.path,
            shape,
            self.budget,
            rank=rank,
            reindex=reindex,
            segment_blocks=SEGMENT_BLOCKS,
        )

    def reopen(self, store: BlockStore) -> BlockStore:
        store.close()
        return self.open()

    def damage(self, name: str, offset: int) -> None:
        path = self.path / name
        data = bytearray(path.read_bytes())
        data[offset] ^= 1
        path.write_bytes(data)

    def append_to_index(self, *bodies: bytes) -> None:
        log, _ = AppendLog.open(self.storage, self.path / "index.log")
        log.append(bodies)
        log.sync()
        log.close()


def reopened(place: Place, shape: StoreShape = OTHER_ROWS) -> BlockStore:
    return place.open(shape, reindex=reindex_to(shape))


def block(number: int, version: int = 0, shape: StoreShape = SHAPE) -> NewBlock:
    chance = random.Random(f"{number}/{version}")
    payload = aligned_buffer(SHAPE.payload_bytes)
    payload[:] = chance.randbytes(SHAPE.payload_bytes)
    return NewBlock(
        number=number,
        page_hash=chance.randbytes(32),
        first_position=chance.choice((-1, 32 * number)),
        payload=payload,
        row=memoryview(row_of(payload, shape)),
    )


def fill(store: BlockStore, numbers: Iterable[int], version: int = 0) -> None:
    store.put([block(number, version, store.shape) for number in numbers])


def buffers(count: int) -> list[memoryview]:
    return [aligned_buffer(SHAPE.payload_bytes) for _ in range(count)]


def assert_holds(store: BlockStore, versions: dict[int, int]) -> None:
    """Exactly these blocks in these versions, by every way to ask for them."""
    store.check_integrity()
    assert [held.number for held in store.blocks()] == sorted(versions)
    rows = dict(store.read_rows())
    assert store.damaged_rows == []
    for run in store.plan_reads(list(versions), 3):
        into = buffers(len(run))
        store.read(run, into)
        for number, payload in zip(run, into, strict=True):
            expected, held = block(number, versions[number], store.shape), store.find(number)
            assert held is not None
            assert payload == expected.payload and rows[number] == expected.row
            assert held.page_hash == expected.page_hash
            assert held.first_position == expected.first_position
    assert rows.keys() == versions.keys()


def slots(store: BlockStore) -> dict[int, int]:
    return {held.number: held.slot for held in store.blocks()}


def files(place: Place) -> list[str]:
    return sorted(entry.name for entry in place.path.iterdir())


def stored(number: int, generation: int, slot: int) -> StoredBlock:
    return StoredBlock(number, generation, slot, -1, bytes(32), bytes(16), bytes(16))
