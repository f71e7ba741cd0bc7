"""Disk → host: bringing selected blocks up, adjacent ones in one read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from kvws.blocks.table import BlockId, Residency
from kvws.errors import CorruptBlock, HostTierFull
from kvws.tiers.disk import DiskTier
from kvws.tiers.repository import Repository

logger = logging.getLogger(__name__)

RUN_BLOCKS = 8
"""Blocks of one vectored read at most: long enough for the device, short enough to overlap."""

READ_THREADS = 4


@dataclass(eq=False)
class Lift:
    """Adjacent blocks of one workspace on their way to host slots.

    Attributes:
        numbers: block numbers, in the order of `entries` and `slots`.
        done: ends when they are in place, with the error otherwise.
        started: a thread has taken it.
    """

    workspace: str
    numbers: tuple[int, ...]
    entries: tuple[Residency, ...]
    slots: tuple[int, ...]
    done: Future[None]
    started: bool = False


class Lifter:
    """Starts reads and puts their blocks in place. A block is read once at a time."""

    def __init__(
        self,
        repository: Repository,
        disk: DiskTier,
        *,
        on_thread_start: Callable[[], None] = lambda: None,
    ) -> None:
        self._repository = repository
        self._disk = disk
        self._demand = ThreadPoolExecutor(READ_THREADS, "kvws-lift", on_thread_start)
        self._ahead = ThreadPoolExecutor(1, "kvws-look-ahead", on_thread_start)
        self._lifting: dict[BlockId, Lift] = {}
        self.lifted_blocks = 0
        self.lost_blocks = 0

    def lift(self, workspace: str, numbers: Sequence[int]) -> list[Lift]:
        """Start to bring up those blocks that have no host copy. What a look-ahead has queued
        overtakes the rest of it.

        Raises:
            HostTierFull: there is no room for all of them; none was started.
        """
        with self._repository.lock:
            on_their_way = [
                lift for n in numbers if (lift := self._lifting.get((workspace, n))) is not None
            ]
            lifts = self._start(workspace, numbers, self._demand)
        ahead = list(dict.fromkeys(on_their_way))
        for lift in ahead:
            self._demand.submit(self._read, lift)
        return ahead + lifts

    def look_ahead(self, workspace: str, numbers: Sequence[int]) -> int:
        """Bring up blocks that may be wanted next, most wanted first, as far as there is room.

        Returns how many were started.
        """
        started = 0
        for begin in range(0, len(numbers), RUN_BLOCKS):
            try:
                lifts = self._start(workspace, numbers[begin : begin + RUN_BLOCKS], self._ahead)
            except HostTierFull:
                break
            started += sum(len(lift.numbers) for lift in lifts)
        return started

    def _start(
        self, workspace: str, numbers: Sequence[int], pool: ThreadPoolExecutor
    ) -> list[Lift]:
        repository = self._repository
        with repository.lock:
            store = self._disk.store_of(workspace)
            if store is None:
                return []
            below: dict[int, Residency] = {}
            for number in numbers:
                entry = repository.table.find((workspace, number))
                if entry is None or entry.slot is not None:
                    continue
                if (workspace, number) not in self._lifting:
                    below[number] = entry
            free = repository.allocate(len(below), workspace)
            repository.in_transit.update(free)
            lifts: list[Lift] = []
            for run in store.plan_reads(list(below), RUN_BLOCKS):
                entries = tuple(below[number] for number in run)
                slots = tuple(free.pop() for _ in run)
                lift = Lift(workspace, tuple(run), entries, slots, Future())
                for number, entry in zip(run, entries, strict=True):
                    repository.table.pin(entry)
                    self._lifting[workspace, number] = lift
                lifts.append(lift)
        for lift in lifts:
            pool.submit(self._read, lift)
        return lifts

    def _read(self, lift: Lift) -> None:
        with self._repository.lock:
            if lift.started:
                return
            lift.started = True
        try:
            self._disk.read(lift.workspace, lift.numbers, lift.slots)
        except Exception as error:
            bad = error.numbers if isinstance(error, CorruptBlock) else lift.numbers
            logger.warning(
                "kvws: %d blocks of workspace %s cannot be read and will be computed again: %s",
                len(bad),
                lift.workspace,
                error,
            )
            self._end(lift, lost=frozenset(bad))
            lift.done.set_exception(error)
        else:
            self._end(lift, lost=frozenset())
            lift.done.set_result(None)

    def _end(self, lift: Lift, lost: frozenset[int]) -> None:
        """Put the blocks of a lift in place; drop those that could not be read."""
        repository = self._repository
        store = self._disk.store_of(lift.workspace)
        with repository.lock:
            for number, entry, slot in zip(lift.numbers, lift.entries, lift.slots, strict=True):
                block = (lift.workspace, number)
                del self._lifting[block]
                stored = store.find(number) if store is not None else None
                if entry.dropped or stored is None or number in lost:
                    repository.in_transit.remove(slot)
                    repository.host.free([slot])
                    if not entry.dropped:
                        repository.drop(block)
                        self.lost_blocks += 1
                else:
                    repository.place(block, entry, slot, stored.first_position)
                    self.lifted_blocks += 1
            repository.unpin(lift.entries)

    def close(self) -> None:
        self._ahead.shutdown(wait=True, cancel_futures=True)
        self._demand.shutdown(wait=True)
