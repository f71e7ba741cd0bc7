"""The disk tier at work beside a repository: one writer, several readers, restored workspaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from kvws.blocks.table import RAW, BlockId, Residency
from kvws.errors import ControlError
from kvws.tiers.disk import DiskTier
from kvws.tiers.lift import Lifter
from kvws.tiers.repository import Repository
from kvws.tiers.write_behind import WriteBehind

_ROWS_AT_ONCE = 512


class DurableBlocks:
    """Keeps a repository's blocks on disk, and brings them back."""

    def __init__(
        self,
        repository: Repository,
        disk: DiskTier,
        *,
        on_thread_start: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_thread_start`: called first on every thread of its own."""
        self.disk = disk
        self.writer = WriteBehind(repository, disk, on_thread_start)
        self.lifter = Lifter(repository, disk, on_thread_start=on_thread_start)
        self._repository = repository
        repository.on_lost_copy = self.writer.note_lost_copy
        repository.only_copies_may_go = lambda: self.writer.paused_because is not None
        self.writer.start()

    @property
    def writing(self) -> bool:
        """Unsaved blocks are on their way to the disk."""
        return self.writer.paused_because is None and self.writer.backlog_blocks > 0

    @property
    def backlogged(self) -> bool:
        """Unsaved blocks fill so much of the host tier that new ones should wait."""
        limit = self._repository.host.capacity_blocks // 4
        return self.writing and self.writer.backlog_blocks > limit

    def save(self, block: BlockId, entry: Residency, row: torch.Tensor) -> None:
        """Queue a new block of an attached workspace for the disk. The repository's lock is held.

        Args:
            row: its index row [row_bytes] uint8, contiguous.
        """
        if self.disk.store_of(block[0]) is not None:
            self.writer.enqueue(block, entry, row)

    def attach(self, workspace: str, directory: Path) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Open a workspace's store and enter its blocks, which have no host copy yet.

        Yields:
            (block numbers, their index rows [blocks, row_bytes] uint8), part by part; the rows
            are overwritten by the next part. A block whose row is damaged is not entered.

        Raises:
            StoreError: it belongs to another model or layout, or cannot be read.
            ControlError: blocks of the workspace are here already.
        """
        if self._repository.table.blocks_of(workspace):
            raise ControlError(f"workspace {workspace} is attached after its first blocks")
        store = self.disk.attach(workspace, directory)
        # One buffer for all parts: a fresh one for each would leave holes in the heap between the
        # tiles of the index, as large as the index itself.
        part = torch.empty((_ROWS_AT_ONCE, self.disk.signals.row_bytes), dtype=torch.uint8)
        part_bytes = part.numpy()
        numbers: list[int] = []
        for number, row in store.read_rows():
            part_bytes[len(numbers)] = row
            numbers.append(number)
            if len(numbers) == _ROWS_AT_ONCE:
                self._enter(workspace, numbers, part)
                yield numbers, part
                numbers = []
        if numbers:
            self._enter(workspace, numbers, part[: len(numbers)])
            yield numbers, part[: len(numbers)]

    def _enter(self, workspace: str, numbers: list[int], rows: torch.Tensor) -> None:
        """Enter stored blocks into the repository."""
        importance = self.disk.signals.importance(rows)
        with self._repository.lock:
            for number, worth in zip(numbers, importance, strict=True):
                entry = Residency("", None, RAW, importance=worth, stored=True)
                self._repository.add((workspace, number), entry)

    def detach(self, workspace: str) -> None:
        """Let go of a workspace's folder; its blocks were dropped from the repository."""
        self.writer.let_go(workspace)
        self.disk.detach(workspace)

    def stats(self) -> dict[str, int]:
        return {
            "disk_used_bytes": self.disk.budget.used_bytes,
            "disk_block_bytes": self.disk.shape.payload_bytes,
            "disk_written_blocks": self.writer.written_blocks,
            "disk_failed_writes": self.writer.failed_writes,
            "disk_paused": self.writer.paused_because is not None,
            "disk_backlog_blocks": self.writer.backlog_blocks,
            "lifted_blocks": self.lifter.lifted_blocks,
            "unreadable_blocks": self.lifter.lost_blocks,
        }

    def close(self) -> None:
        """Write what is queued, end all threads, close all stores."""
        self.writer.close()
        self.lifter.close()
        self.disk.close()
