"""Host → disk: making finished blocks durable behind the engine's back."""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvws.blocks.table import BlockId, Residency
from kvws.errors import StoreError
from kvws.tiers.disk import DiskTier, UnsavedBlock
from kvws.tiers.repository import Repository

logger = logging.getLogger(__name__)

BATCH_BLOCKS = 32
"""Blocks written between two syncs: a sync costs as much as writing several of them."""

FIRST_RETRY_S, LAST_RETRY_S = 0.5, 30.0


@dataclass(frozen=True)
class _Queued:
    block: BlockId
    entry: Residency
    row: torch.Tensor


class WriteBehind:
    """One thread that writes blocks in the order in which they were registered.

    A failed write pauses it: one log line, blocks stay queued, and it tries again by itself until
    the disk takes them. While it is paused nobody waits for it.
    """

    def __init__(
        self, repository: Repository, disk: DiskTier, on_thread_start: Callable[[], None]
    ) -> None:
        """`on_thread_start`: called first on the thread."""
        self._repository = repository
        self._disk = disk
        self._queue: deque[_Queued] = deque()
        self._pending: Counter[str] = Counter()
        self._lost_copies: defaultdict[str, set[int]] = defaultdict(set[int])
        self._changed = threading.Condition(repository.lock)
        self._in_hand: str | None = None
        self._closing = False
        self.paused_because: str | None = None
        self.written_blocks = 0
        self.failed_writes = 0
        self._on_thread_start = on_thread_start
        self._thread = threading.Thread(target=self._run, name="kvws-write-behind", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def enqueue(self, block: BlockId, entry: Residency, row: torch.Tensor) -> None:
        """Queue a block that was just entered into the repository. Lock held."""
        workspace, number = block
        self._queue.append(_Queued(block, entry, row))
        self._pending[workspace] += 1
        self._lost_copies[workspace].discard(number)  # it was computed again
        self._changed.notify()

    def note_lost_copy(self, block: BlockId) -> None:
        """A queued block lost its only copy: it stays unsaved until it is computed again. Lock
        held."""
        workspace, number = block
        self._lost_copies[workspace].add(number)

    def forget(self, workspace: str, numbers: Sequence[int] | None = None) -> None:
        """Nobody waits any more for blocks that lost their copies; for any if None. Lock held."""
        if numbers is None:
            self._lost_copies.pop(workspace, None)
        else:
            self._lost_copies[workspace].difference_update(numbers)

    def unsaved(self, workspace: str) -> int:
        """Blocks of a workspace that are not durable: queued, or lost before they were. Lock
        held."""
        return self._pending[workspace] + len(self._lost_copies[workspace])

    def let_go(self, workspace: str) -> None:
        """Wait until no block of a workspace is being written. Those queued must be dropped."""
        with self._changed:
            self._changed.wait_for(lambda: self._in_hand != workspace)

    @property
    def backlog_blocks(self) -> int:
        return len(self._queue)

    def close(self) -> None:
        """Write what is queued, unless the disk is in trouble, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        self._on_thread_start()
        retry_s = FIRST_RETRY_S
        while True:
            batch = self._next_batch()
            if batch is None:
                return
            failure = self._write(batch)
            forgotten = self._settle(batch, stored=failure is None)
            if forgotten:  # meanwhile; outside the lock, since it waits for the disk
                self._disk.forget(batch[0].block[0], forgotten)
            with self._changed:
                self._in_hand = None
                self._changed.notify_all()
                if failure is None:
                    retry_s = FIRST_RETRY_S
                    self._recovered()
                    continue
                self._pause(failure)
                if self._closing:
                    return
                self._changed.wait_for(lambda: self._closing, timeout=retry_s)
                retry_s = min(2 * retry_s, LAST_RETRY_S)

    def _next_batch(self) -> list[_Queued] | None:
        """The oldest queued blocks, all of one workspace, pinned; None at the end."""
        with self._changed:
            while True:
                while self._queue and self._queue[0].entry.dropped:
                    self._forget_oldest()
                if self._queue:
                    break
                if self._closing:
                    return None
                self._changed.wait()
            workspace = self._queue[0].block[0]
            batch: list[_Queued] = []
            for queued in self._queue:
                if len(batch) == BATCH_BLOCKS or queued.block[0] != workspace:
                    break
                if not queued.entry.dropped:
                    self._repository.table.pin(queued.entry)
                    batch.append(queued)
            self._in_hand = workspace
            return batch

    def _forget_oldest(self) -> None:
        queued = self._queue.popleft()
        self._pending[queued.block[0]] -= 1

    def _write(self, batch: list[_Queued]) -> Exception | None:
        unsaved: list[UnsavedBlock] = []
        for queued in batch:
            assert queued.entry.slot is not None, "a pinned block keeps its slot"
            unsaved.append(
                UnsavedBlock(
                    number=queued.block[1],
                    page_hash=queued.entry.page_hash,
                    slot=queued.entry.slot,
                    first_position=queued.entry.first_position,
                    row=queued.row,
                )
            )
        try:
            self._disk.write(batch[0].block[0], unsaved)
        except (OSError, StoreError) as error:
            return error
        except Exception as error:  # our own fault; the thread must outlive it
            logger.exception("kvws: blocks could not be made ready for the disk")
            return error
        return None

    def _settle(self, batch: list[_Queued], *, stored: bool) -> list[int]:
        """Unpin a batch; what was written leaves the queue.

        Returns:
            Blocks that were written and had been dropped meanwhile.
        """
        with self._changed:
            forgotten: list[int] = []
            for queued in batch:
                if stored and queued.entry.dropped:
                    forgotten.append(queued.block[1])
                elif stored:
                    self._repository.mark_stored(queued.block, queued.entry)
            if stored:
                written = {id(queued) for queued in batch}
                while self._queue and (
                    id(self._queue[0]) in written or self._queue[0].entry.dropped
                ):
                    self._forget_oldest()
                self.written_blocks += len(batch)
            self._repository.unpin([queued.entry for queued in batch])
            return forgotten

    def _pause(self, failure: Exception) -> None:
        self.failed_writes += 1
        if self.paused_because is None:
            logger.warning(
                "kvws: the disk tier is paused, the session goes on without it: %s", failure
            )
        self.paused_because = str(failure)

    def _recovered(self) -> None:
        if self.paused_because is not None:
            logger.warning("kvws: the disk tier takes blocks again")
            self.paused_because = None
