"""Blocks of one rank on a disk: what was acknowledged is there, or is told to be damaged."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from kvws.errors import CorruptBlock
from kvws.store.block import NewBlock, Reindex, SpaceBudget, StoredBlock, StoreShape
from kvws.store.index_records import (
    encode_base,
    encode_drop,
    encode_put,
    encode_whole,
    replay,
    whole_bytes,
)
from kvws.store.log import AppendLog
from kvws.store.rank_manifest import settle_layout, with_new_rows
from kvws.store.record import HEADER_BYTES
from kvws.store.recovery import Recovery, settle_segments
from kvws.store.reindexing import NewRows, Reindexing
from kvws.store.segment import SegmentLayout
from kvws.store.segment_files import SegmentFiles
from kvws.store.segment_space import SegmentSpace
from kvws.store.storage import Storage
from kvws.store.transfer import MAX_READ_BLOCKS, read_blocks, read_rows, write_blocks
from kvws.store.verification import VerifyReport, blocks_at_once, unreadable_payloads


class BlockStore:
    """Fixed-size blocks in the slots of segments, and an index log that names them.

    A put writes payload, footer and row, makes them durable, and only then writes its one index
    frame: a crash leaves a batch whole or absent. A slot is reused only after the frame that
    freed it is durable, and after every index frame that failed is durably gone.

    Digests detect accidents, not somebody who may write to the directory.

    Writers (`put`, `drop`, `compact`) wait for each other; reads run beside them. The caller
    neither drops nor replaces a block while it is read.

    Attributes:
        recovery: what `open` had to repair.
        reindexing: the rows that `open` made anew; None if the old ones were as wanted.
        damaged_rows: numbers whose row the last `read_rows` could not read.
    """

    def __init__(
        self,
        storage: Storage,
        directory: Path,
        layout: SegmentLayout,
        budget: SpaceBudget,
        log: AppendLog,
    ) -> None:
        """Use `open`."""
        self._storage = storage
        self._directory = directory
        self._layout = layout
        self._budget = budget
        self._log = log
        self._files = SegmentFiles(storage, directory, layout)
        self._space = SegmentSpace(self._files, layout, budget, (), ())
        self._blocks: dict[int, StoredBlock] = {}
        self._next_generation = 0
        self._writing = threading.Lock()
        self._index_lock = threading.Lock()
        self.recovery = Recovery(0, 0, 0, 0)
        self.reindexing: Reindexing | None = None
        self.damaged_rows: list[int] = []

    @classmethod
    def open(
        cls,
        storage: Storage,
        directory: Path,
        shape: StoreShape,
        budget: SpaceBudget,
        *,
        rank: int = 0,
        reindex: Reindex | None = None,
        segment_blocks: int = 64,
    ) -> BlockStore:
        """Create or continue the store in a directory, whose parent exists.

        Reads the index and no payloads, unless rows have to be made anew. Segments that a smaller
        budget does not hold stay in use.

        Args:
            reindex: makes rows anew if those of the store are of another format or size. Until
                that is done and durable, the store is what it was; afterwards blocks whose
                payload is damaged are gone from it.

        Raises:
            OtherModel: it was made for another shape or rank; without `reindex`, for other rows.
            StoreFormatError: its manifest is missing, not ours, damaged or newer.
            DiskTierFull: there is no room for new rows beside the old ones.
            OSError: the disk's error. For it, and for whatever `reindex` raises: the store has
                its old rows, or (if the disk failed in the end) perhaps the new ones.
        """
        if not storage.exists(directory):
            storage.make_directory(directory)
        storage.sync_directory(directory.parent)
        layout = settle_layout(
            storage,
            directory,
            shape,
            rank,
            segment_blocks,
            rows_may_differ=reindex is not None,
        )
        # A killed process may have left names in the cache alone; the index comes after them.
        storage.sync_directory(directory)
        store = cls._open(storage, directory, layout, budget)
        if reindex is None or layout.shape == shape:
            return store
        new_layout = with_new_rows(layout, shape)
        with contextlib.closing(store):
            rows = NewRows(storage, directory, layout, new_layout)
            made = rows.make(budget, rank, store.blocks(), store._next_generation, reindex)
        reindexed = cls._open(storage, directory, new_layout, budget)
        reindexed.recovery, reindexed.reindexing = store.recovery, made
        return reindexed

    @classmethod
    def _open(
        cls, storage: Storage, directory: Path, layout: SegmentLayout, budget: SpaceBudget
    ) -> BlockStore:
        """Continue the store of a directory with a durable manifest of this layout."""
        log, scan = AppendLog.open(storage, directory / layout.index_name)
        store = cls(storage, directory, layout, budget, log)
        try:
            state = replay(body for _, body in scan.frames)
            store._recover(state.blocks, state.next_generation)
            missing_bytes = 0 if scan.frames else store._begin_index()
        except BaseException:
            store.close()
            raise
        dropped_blocks = len(state.blocks) - len(store._blocks)
        store.recovery = Recovery(
            cut_bytes=scan.torn_bytes,
            skipped_bytes=scan.skipped_bytes + missing_bytes,
            unknown_records=state.unknown_records,
            dropped_blocks=dropped_blocks,
        )
        return store

    def _recover(self, blocks: dict[int, StoredBlock], next_generation: int) -> None:
        """Take over what the index says, as far as the files hold it."""
        self._blocks = dict(blocks)
        self._next_generation = next_generation
        segments, lost = settle_segments(
            self._storage, self._directory, self._layout, self._blocks
        )
        used = [block.slot for block in self._blocks.values()]
        self._space = SegmentSpace(self._files, self._layout, self._budget, segments, used)
        if lost:
            # Without the record they would be back, damaged, when their segment is made again.
            with contextlib.suppress(OSError):
                self._commit(encode_drop(lost))

    def _begin_index(self) -> int:
        """Write the first frame of the index. Returns its size if there must have been one."""
        self._commit(encode_base(self._next_generation))
        # The first segment was made after it was durable.
        return self._log.size_bytes if self._space.segments else 0

    @property
    def shape(self) -> StoreShape:
        return self._layout.shape

    @property
    def allocated_bytes(self) -> int:
        """Disk space of the segments, used or not."""
        return self._space.allocated_bytes

    def blocks(self) -> list[StoredBlock]:
        """All blocks, by ascending number."""
        with self._index_lock:
            blocks = list(self._blocks.values())
        return sorted(blocks, key=lambda block: block.number)

    def find(self, number: int) -> StoredBlock | None:
        return self._blocks.get(number)

    def put(self, blocks: Sequence[NewBlock]) -> None:
        """Store blocks, all or none; they are durable when this returns.

        Replaces blocks of the same numbers; after an error or a crash the old ones are there, or
        (after a crash) all the new ones.

        Args:
            blocks: of different numbers.

        Raises:
            DiskTierFull: the budget holds no further segment.
            OSError: the disk's error; the store can be used further.
        """
        if not blocks:
            return
        assert len({block.number for block in blocks}) == len(blocks), "a number is put twice"
        for block in blocks:
            block.assert_fits(self._layout.shape)
        with self._writing:
            # A frame that failed may still be on the disk and name slots taken here.
            self._log.heal()
            slots = self._space.take(len(blocks))
            try:
                stored = self._stamp(blocks, slots)
                write_blocks(self._files, self._layout, blocks, stored)
                self._commit(encode_put(stored))
            except BaseException:
                self._space.give_back(slots)
                raise
            with self._index_lock:
                replaced = [self._blocks.get(block.number) for block in stored]
                self._blocks.update((block.number, block) for block in stored)
            self._space.give_back(block.slot for block in replaced if block is not None)

    def drop(self, numbers: Iterable[int]) -> None:
        """Forget blocks, durably, all or none; numbers that are not stored are passed over.

        Raises:
            OSError: the disk's error; the blocks are still there.
        """
        with self._writing:
            gone = [self._blocks[number] for number in set(numbers) if number in self._blocks]
            if not gone:
                return
            self._commit(encode_drop(block.number for block in gone))
            with self._index_lock:
                for block in gone:
                    del self._blocks[block.number]
            self._space.give_back(block.slot for block in gone)

    def plan_reads(self, numbers: Iterable[int], max_blocks: int) -> list[tuple[int, ...]]:
        """Cut blocks into runs that lie together on the disk, for one `read` each.

        Args:
            max_blocks: of one run.

        Raises:
            CorruptBlock: a number is not stored.
        """
        found = {number: self._blocks.get(number) for number in numbers}
        missing = [number for number, block in found.items() if block is None]
        if missing:
            raise CorruptBlock(missing, f"{self._directory} does not hold blocks {missing}")
        places = sorted(filter(None, found.values()), key=lambda block: block.slot)
        at_most = max(1, min(max_blocks, MAX_READ_BLOCKS))
        runs = self._layout.adjacent([place.slot for place in places], at_most)
        return [tuple(places[index].number for index in run) for run in runs]

    def read(self, run: Sequence[int], into: Sequence[memoryview]) -> None:
        """Read payloads: one request if the blocks are adjacent, as those of `plan_reads` are.

        Args:
            into: for each block `payload_bytes` in memory aligned to SECTOR_BYTES.

        Raises:
            CorruptBlock: names the blocks that are damaged or not stored; the buffers of the
                others are filled.
            OSError: the disk's error; no buffer is to be used.
        """
        assert len(run) == len(into), f"{len(into)} buffers for {len(run)} blocks"
        places: list[StoredBlock] = []
        buffers: list[memoryview] = []
        damaged: list[int] = []
        for number, buffer in zip(run, into, strict=True):
            place = self._blocks.get(number)
            if place is None:
                damaged.append(number)
            else:
                places.append(place)
                buffers.append(buffer)
        damaged += read_blocks(self._files, self._layout, places, buffers)
        if damaged:
            raise CorruptBlock(
                damaged, f"{self._directory} does not hold what was written of blocks {damaged}"
            )

    def read_rows(self) -> Iterator[tuple[int, memoryview]]:
        """(number, row) of every block in slot order, read in large pieces.

        A row that cannot be read, or is not what was written, is left out and its block listed in
        `damaged_rows`.
        """
        self.damaged_rows = []
        places = sorted(self.blocks(), key=lambda block: block.slot)
        return read_rows(self._files, self._layout, places, self.damaged_rows)

    def verify(self, on_progress: Callable[[int], None] | None = None) -> VerifyReport:
        """Read and check every payload and row.

        Args:
            on_progress: called with the number of blocks checked since the last call.
        """
        numbers = [block.number for block in self.blocks()]
        payload_bytes = self._layout.shape.payload_bytes
        corrupt = unreadable_payloads(
            self.plan_reads(numbers, blocks_at_once(payload_bytes)),
            self.read,
            payload_bytes,
            on_progress or (lambda checked_blocks: None),
        )
        for _ in self.read_rows():
            pass
        return VerifyReport(len(numbers), tuple(sorted(corrupt)), tuple(sorted(self.damaged_rows)))

    def compact(self) -> None:
        """Delete segments without blocks, and rewrite the index if most of it is out of date.

        Raises:
            OSError: the disk's error; the store can be used further.
        """
        with self._writing:
            # A put that failed may still be on the disk and name slots of these segments.
            self._log.heal()
            if self._space.remove_unused():
                self._storage.sync_directory(self._directory)
            blocks = list(self._blocks.values())
            if self._log.size_bytes > 2 * whole_bytes(len(blocks), HEADER_BYTES):
                self._log.rewrite(encode_whole(blocks, self._next_generation))

    def check_integrity(self) -> None:
        """Blocks, slots, segments and budget add up; for times when nobody writes."""
        with self._writing:
            blocks = self._blocks
            assert all(number == block.number for number, block in blocks.items())
            self._space.check_integrity([block.slot for block in blocks.values()])
            generations = {block.generation for block in blocks.values()}
            assert len(generations) == len(blocks), "two blocks are of one generation"
            assert max(generations, default=-1) < self._next_generation

    def close(self) -> None:
        """Close the files and give the budget back; the store must not be used any more."""
        self._files.close()
        self._log.close()
        self._space.close()

    def _stamp(self, blocks: Sequence[NewBlock], slots: Sequence[int]) -> list[StoredBlock]:
        """What the index will say of blocks. Generations that a failure leaves unused are lost."""
        first_generation = self._next_generation
        self._next_generation += len(blocks)
        return [
            block.stored_at(slot, first_generation + index)
            for index, (block, slot) in enumerate(zip(blocks, slots, strict=True))
        ]

    def _commit(self, body: bytes) -> None:
        """Add one frame to the index, durably. Raises OSError: it is not there, nor will it be."""
        self._log.append([body])
        self._log.sync()
