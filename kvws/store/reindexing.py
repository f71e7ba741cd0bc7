"""Making the rows of a store anew, from its payloads, beside the old ones.

New rows and an index that names them are written under names of their own and made durable; then
the manifest is replaced, which takes the store from the old rows to the new ones at once. Whatever
happens before, nobody knows of the new files; whatever happens after, nobody needs the old ones.
Either are removed by the next open.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from xxhash import xxh3_128_digest

from kvws.errors import DiskTierFull
from kvws.store.block import Reindex, SpaceBudget, StoredBlock
from kvws.store.index_records import encode_whole
from kvws.store.log import write_log
from kvws.store.rank_manifest import write_layout
from kvws.store.segment import SegmentLayout, aligned_buffer, is_of_another_row_set
from kvws.store.segment_files import SegmentFiles
from kvws.store.storage import Storage
from kvws.store.transfer import MAX_READ_BLOCKS, read_blocks
from kvws.store.verification import blocks_at_once

logger = logging.getLogger("kvws.store")

_ROWS_WRITE_BYTES = 8 << 20
"""About how many new rows wait in memory for one write."""
_SINGLE_READS = 2
_TOLD_BLOCKS = 16
_BYTES_ARE_LOST = frozenset({errno.EIO, errno.ENODATA, errno.EBADMSG})
"""What the system says of a sector that cannot be read; others are no fault of the bytes."""
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True)
class Reindexing:
    """What making rows anew came to.

    Attributes:
        blocks: that have a new row.
        unreadable_blocks: numbers of those that are gone, since their payload is damaged.
    """

    blocks: int
    unreadable_blocks: tuple[int, ...]


class NewRows:
    """The row set that is written beside that of an open store.

    Nobody else uses the directory meanwhile, and the store's own files are left as they are.
    """

    def __init__(
        self, storage: Storage, directory: Path, old: SegmentLayout, new: SegmentLayout
    ) -> None:
        """Nothing is written yet.

        Args:
            old, new: of the same payloads.
        """
        assert new.row_set != old.row_set, "new rows would replace the old ones"
        assert replace(new, shape=old.shape, row_set=old.row_set) == old, "the payloads differ"
        self._storage = storage
        self._directory = directory
        self._old = old
        self._new = new

    def make(
        self,
        budget: SpaceBudget,
        rank: int,
        blocks: Sequence[StoredBlock],
        next_generation: int,
        reindex: Reindex,
    ) -> Reindexing:
        """Write the rows of all readable blocks and their index, and let them count from here on.

        Args:
            budget: has room for both row sets at once.
            blocks: all that the store holds.

        Raises:
            DiskTierFull: there is not enough space, of the budget or on the disk.
            OSError: the disk's error. The old rows count, but if it came with the manifest it may
                have been replaced. What is left of new rows is removed by the next open.
        """
        with self._space(budget, blocks):
            made = self._write(blocks, next_generation, reindex)
            write_layout(self._storage, self._directory, self._new, rank)
        if made.unreadable_blocks:
            logger.warning(
                "%s: %d damaged blocks were given up, such as %s; the other %d have new rows",
                self._directory,
                len(made.unreadable_blocks),
                list(made.unreadable_blocks[:_TOLD_BLOCKS]),
                made.blocks,
            )
        return made

    @contextlib.contextmanager
    def _space(
        self, budget: SpaceBudget, blocks: Sequence[StoredBlock]
    ) -> Generator[None, None, None]:
        """Room for both row sets, while it is entered; errors within that say of the disk that
        there is none become DiskTierFull."""
        segments = {self._old.segment(block.slot) for block in blocks}
        needed_bytes = len(segments) * self._new.rows_file_bytes
        try:
            budget.take(needed_bytes)
        except DiskTierFull as error:
            raise self._too_full(needed_bytes, error) from error
        try:
            yield
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            raise self._too_full(needed_bytes, error) from error
        finally:
            budget.give_back(needed_bytes)

    def _too_full(self, needed_bytes: int, error: Exception) -> DiskTierFull:
        return DiskTierFull(
            f"{self._directory} has no room for {needed_bytes} bytes of new rows beside the old "
            f"ones: {error.args[0] if isinstance(error, DiskTierFull) else error}",
            hint="make room with `kvws sessions rm` or `kvws sessions gc`, raise --disk-gb, or "
            "use the signals that the rows were made for",
        )

    def _write(
        self, blocks: Sequence[StoredBlock], next_generation: int, reindex: Reindex
    ) -> Reindexing:
        """New rows and their index are durable when this returns."""
        places = sorted(blocks, key=lambda block: block.slot)
        try:
            with contextlib.closing(self._files(self._old)) as payloads:
                found, unreadable = self._write_rows(places, payloads, reindex)
            index_path = self._directory / self._new.index_name
            write_log(self._storage, index_path, encode_whole(found, next_generation))
            self._storage.sync_directory(self._directory)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error is the one to tell
                self._remove()
            raise
        return Reindexing(len(found), tuple(sorted(unreadable)))

    def _write_rows(
        self, places: Sequence[StoredBlock], payloads: SegmentFiles, reindex: Reindex
    ) -> tuple[list[StoredBlock], list[int]]:
        """Returns the blocks as the new index names them, and the numbers of the unreadable."""
        handed_out: deque[StoredBlock] = deque()
        unreadable: list[int] = []
        found: list[StoredBlock] = []
        source = self._readable(places, payloads, handed_out, unreadable)
        writer = _RowsWriter(self._files(self._new), self._new)
        for row in reindex(source):
            assert handed_out, "a row of no block"
            assert len(row) == self._new.shape.row_bytes, f"a row of {len(row)} bytes"
            block = handed_out.popleft()
            found.append(replace(block, row_digest=xxh3_128_digest(row)))
            writer.add(block.slot, row)
        assert next(source, None) is None and not handed_out, "a block without a row"
        writer.flush()
        return found, unreadable

    def _readable(
        self,
        places: Sequence[StoredBlock],
        payloads: SegmentFiles,
        handed_out: deque[StoredBlock],
        unreadable: list[int],
    ) -> Iterator[tuple[StoredBlock, memoryview]]:
        """Blocks with their payloads, of one request after the other.

        Mutates `handed_out` and `unreadable`.
        """
        payload_bytes = self._old.shape.payload_bytes
        at_once = min(MAX_READ_BLOCKS, blocks_at_once(payload_bytes))
        for run in self._old.adjacent([place.slot for place in places], at_once):
            wanted = places[run.start : run.stop]
            # The receiver may keep the memory of a request while the next one is read.
            memory = aligned_buffer(len(wanted) * payload_bytes)
            into = [memory[n * payload_bytes :][:payload_bytes] for n in range(len(wanted))]
            damaged = self._read(payloads, wanted, into)
            unreadable += damaged
            for place, payload in zip(wanted, into, strict=True):
                if place.number not in damaged:
                    handed_out.append(place)
                    yield place, payload

    def _read(
        self, payloads: SegmentFiles, places: Sequence[StoredBlock], into: Sequence[memoryview]
    ) -> list[int]:
        """Numbers of the blocks that cannot be read. A disk that fails once is asked again, since
        a block that is not read here is gone."""
        with contextlib.suppress(OSError):
            return read_blocks(payloads, self._old, places, into)
        damaged: list[int] = []
        for place, buffer in zip(places, into, strict=True):
            for attempt in range(_SINGLE_READS):
                try:
                    damaged += read_blocks(payloads, self._old, [place], [buffer])
                    break
                except OSError as error:
                    if error.errno not in _BYTES_ARE_LOST:
                        raise
                    if attempt == _SINGLE_READS - 1:
                        damaged.append(place.number)
        return damaged

    def _remove(self) -> None:
        for name in self._storage.list_directory(self._directory):
            if is_of_another_row_set(name, self._old.row_set):
                self._storage.unlink(self._directory / name)

    def _files(self, layout: SegmentLayout) -> SegmentFiles:
        return SegmentFiles(self._storage, self._directory, layout)


class _RowsWriter:
    """Rows of ascending slots, written in large pieces; each is durable after `flush`."""

    def __init__(self, files: SegmentFiles, layout: SegmentLayout) -> None:
        self._files = files
        self._layout = layout
        self._segment = -1
        self._slots: list[int] = []
        self._rows: list[memoryview] = []
        self._max_rows = max(1, _ROWS_WRITE_BYTES // layout.shape.row_bytes)

    def add(self, slot: int, row: bytes) -> None:
        segment = self._layout.segment(slot)
        if segment != self._segment:
            self.flush()
            self._files.create_rows(segment)
            self._segment = segment
        self._slots.append(slot)
        self._rows.append(memoryview(row))
        if len(self._rows) >= self._max_rows:
            self.flush()

    def flush(self) -> None:
        if self._rows:
            self._files.write_rows(self._slots, self._rows)
            self._slots, self._rows = [], []
