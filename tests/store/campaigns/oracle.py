"""What a store must hold: a plain dict of what was acknowledged, and the check against it."""

from __future__ import annotations

import mmap
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

from kvws.errors import CorruptBlock, DiskTierFull
from kvws.store.block import NewBlock, StoreShape
from kvws.store.block_store import BlockStore
from kvws.store.rank_manifest import read_layout
from kvws.store.storage import Storage
from tests.store.rows import reindex_to, row_of

SHAPE = StoreShape(4096, 32, "exact", "mean-k/float32/v1")
OTHER_ROWS = StoreShape(4096, 48, "exact", "other/v1")
SEGMENT_BLOCKS = 4
RUN_BLOCKS = 8
FOLDER = Path("/disk/rank-0")

_MEMORY = memoryview(mmap.mmap(-1, RUN_BLOCKS * SHAPE.payload_bytes))
_BUFFERS = [_MEMORY[i : i + SHAPE.payload_bytes] for i in range(0, len(_MEMORY), 4096)]


class Violation(AssertionError):
    """The store broke a promise."""


class Damaged(Violation):
    """The store says that blocks are damaged that must not be."""


@dataclass(frozen=True)
class Content:
    """One version of one block. The page hash tells which.

    `aligned` holds the payload's bytes for `put`.
    """

    number: int
    page_hash: bytes
    first_position: int
    payload: bytes
    aligned: memoryview = field(compare=False, repr=False)

    def new_block(self, shape: StoreShape) -> NewBlock:
        return NewBlock(
            number=self.number,
            page_hash=self.page_hash,
            first_position=self.first_position,
            payload=self.aligned,
            row=memoryview(row_of(self.payload, shape)),
        )


@lru_cache(maxsize=4096)
def content(number: int, version: int) -> Content:
    """Bytes that no other block, version or sector has; the payload is aligned."""
    chance = random.Random(number << 32 | version)
    payload = chance.randbytes(SHAPE.payload_bytes)
    aligned = memoryview(mmap.mmap(-1, SHAPE.payload_bytes))
    aligned[:] = payload
    return Content(
        number=number,
        page_hash=blake2b(f"{number}/{version}".encode(), digest_size=32).digest(),
        first_position=chance.choice((-1, 64 * number)),
        payload=payload,
        aligned=aligned,
    )


class Budget:
    """A `SpaceBudget` that counts, and refuses beyond `limit_bytes`."""

    def __init__(self, limit_bytes: int = 1 << 40) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    def take(self, size_bytes: int) -> None:
        if self.used_bytes + size_bytes > self.limit_bytes:
            raise DiskTierFull("the test's budget is spent")
        self.used_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        self.used_bytes -= size_bytes
        assert self.used_bytes >= 0


def open_store(
    storage: Storage,
    folder: Path = FOLDER,
    budget: Budget | None = None,
    *,
    other_rows: bool = False,
) -> BlockStore:
    """Open a store with the rows that it has, or make the others anew."""
    try:
        shape = read_layout(storage, folder).shape
    except FileNotFoundError:
        shape = SHAPE
    if other_rows:
        shape = OTHER_ROWS if shape == SHAPE else SHAPE
    return BlockStore.open(
        storage,
        folder,
        shape,
        budget or Budget(),
        rank=0,
        reindex=reindex_to(shape) if other_rows else None,
        segment_blocks=SEGMENT_BLOCKS,
    )


@dataclass
class Oracle:
    """What a store may answer.

    Attributes:
        settled: blocks that were acknowledged and not dropped.
        doubtful: for blocks whose last operation raised: everything they may be, None for absent.
        in_flight: the operation under way: a batch of puts, or drops (None).
        ever: every content that was offered, by page hash.
    """

    settled: dict[int, Content] = field(default_factory=dict[int, Content])
    doubtful: dict[int, tuple[Content | None, ...]] = field(
        default_factory=dict[int, tuple[Content | None, ...]]
    )
    in_flight: dict[int, Content | None] = field(default_factory=dict[int, Content | None])
    ever: dict[bytes, Content] = field(default_factory=dict[bytes, Content])
    next_number: int = 0
    versions: int = 0

    def copy(self) -> Oracle:
        """For another future; offered contents are shared."""
        return Oracle(
            dict(self.settled),
            dict(self.doubtful),
            dict(self.in_flight),
            self.ever,
            self.next_number,
            self.versions,
        )

    def offer(self, number: int, version: int | None = None) -> Content:
        """A new version of a block, to be put; the next one, or one that was chosen elsewhere."""
        version = self.versions + 1 if version is None else version
        self.versions = max(self.versions, version)
        self.next_number = max(self.next_number, number + 1)
        offered = content(number, version)
        self.ever[offered.page_hash] = offered
        return offered

    def begin(self, operation: Mapping[int, Content | None]) -> None:
        assert not self.in_flight
        self.in_flight = dict(operation)

    def acknowledge(self) -> None:
        for number, offered in self.in_flight.items():
            self.doubtful.pop(number, None)
            if offered is None:
                self.settled.pop(number, None)
            else:
                self.settled[number] = offered
        self.in_flight = {}

    def fail(self) -> None:
        """The operation under way raised: a restart may find it done or not."""
        for number, offered in self.in_flight.items():
            self.doubtful[number] = (*self.allowed(number), offered)
        self.in_flight = {}

    def allowed(self, number: int) -> tuple[Content | None, ...]:
        """What a block may be without the operation under way."""
        return self.doubtful.get(number) or (self.settled.get(number),)

    def check_restart(self, store: BlockStore) -> None:
        """A freshly opened store holds what it must; what it holds is settled from here on.

        Raises:
            Violation: it does not.
        """
        held = read_everything(store, self.ever)
        done: set[bool] = set()
        numbers = held.keys() | self.settled.keys() | self.doubtful.keys() | self.in_flight.keys()
        for number in numbers:
            found, allowed = held.get(number), self.allowed(number)
            if number in self.in_flight:
                new = self.in_flight[number]
                if (found in allowed) != (found == new):
                    done.add(found == new)
                allowed = (*allowed, new)
            if found not in allowed:
                what = "is gone" if found is None else "is another version, or came back"
                raise Violation(f"block {number} {what}; recovery: {store.recovery}")
        if len(done) > 1:
            raise Violation(f"half of a batch is there: {sorted(self.in_flight)}")
        self.settled, self.doubtful, self.in_flight = held, {}, {}

    def check_running(self, store: BlockStore) -> None:
        """A store that was not restarted holds exactly the settled blocks: an operation that
        raised changed nothing.

        Raises:
            Violation: it does not.
        """
        held = read_everything(store, self.ever)
        for number in held.keys() | self.settled.keys():
            if held.get(number) != self.settled.get(number):
                raise Violation(f"block {number} is not what was acknowledged")


def read_everything(store: BlockStore, ever: Mapping[bytes, Content]) -> dict[int, Content]:
    """Every block of a store, read and compared.

    Raises:
        Damaged: a block is.
        Violation: a block is not what its page hash says, or the store's own equations do not
            hold.
    """
    held, damaged = read_undamaged(store, ever)
    if damaged:
        raise Damaged(f"blocks {sorted(damaged)} are damaged; recovery: {store.recovery}")
    try:
        store.check_integrity()
    except AssertionError as error:
        raise Violation(f"check_integrity: {error}") from error
    return held


def read_undamaged(
    store: BlockStore, ever: Mapping[bytes, Content]
) -> tuple[dict[int, Content], set[int]]:
    """(blocks that read back right, blocks that the store calls damaged).

    Raises:
        Violation: a block is wrong and the store does not say so.
    """
    held: dict[int, Content] = {}
    blocks = store.blocks()
    numbers = [block.number for block in blocks]
    if numbers != sorted(set(numbers)):
        raise Violation(f"blocks() is not ascending: {numbers}")
    for block in blocks:
        offered = ever.get(block.page_hash)
        if offered is None or (block.number, block.first_position) != (
            offered.number,
            offered.first_position,
        ):
            raise Violation(f"block {block.number} is listed with foreign fields")
        held[block.number] = offered
    damaged = _check_payloads(store, held) | _check_rows(store, held)
    return {n: offered for n, offered in held.items() if n not in damaged}, damaged


def _check_payloads(store: BlockStore, held: Mapping[int, Content]) -> set[int]:
    damaged: set[int] = set()
    planned: list[int] = []
    for run in store.plan_reads(list(held), RUN_BLOCKS):
        planned += run
        bad: tuple[int, ...] = ()
        try:
            store.read(run, _BUFFERS[: len(run)])
        except CorruptBlock as error:
            bad = error.numbers
            if not bad or not set(bad) <= set(run):
                raise Violation(f"CorruptBlock names {bad}, read were {run}") from error
        for number, buffer in zip(run, _BUFFERS, strict=False):
            if number not in bad and bytes(buffer) != held[number].payload:
                raise Violation(f"block {number} reads back wrong")
        damaged.update(bad)
    if sorted(planned) != sorted(held):
        raise Violation(f"plan_reads covers {planned}, asked were {sorted(held)}")
    return damaged


def _check_rows(store: BlockStore, held: Mapping[int, Content]) -> set[int]:
    rows: dict[int, bytes] = {}
    for number, row in store.read_rows():
        if number in rows or number not in held:
            raise Violation(f"read_rows yields block {number} twice, or it is not there")
        rows[number] = bytes(row)
        if rows[number] != row_of(held[number].payload, store.shape):
            raise Violation(f"the row of block {number} reads back wrong")
    damaged = set(store.damaged_rows)
    if rows.keys() ^ held.keys() != damaged:
        raise Violation(f"rows of {sorted(rows)} came, {sorted(damaged)} are called damaged")
    return damaged
