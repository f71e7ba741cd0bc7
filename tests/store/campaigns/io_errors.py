"""Every operation of a workload fails once: EIO, ENOSPC or a short write, alone or in a row.

After each error the store still holds what was acknowledged and nothing else, the same call (or
another one, when the caller gives up) succeeds once the disk works again, and a restart (clean, or
after a power loss) finds every acknowledged block.
"""

from __future__ import annotations

import errno
import random
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvws.errors import DiskTierFull
from kvws.store.block_store import BlockStore
from tests.store.campaigns.oracle import FOLDER, Budget, Damaged, Oracle, Violation, open_store
from tests.store.campaigns.report import Report, arguments, end_when_stuck, finish
from tests.store.simulated_disk import Fault, SimulatedDisk

REFUSALS = (OSError, DiskTierFull)
MAX_ATTEMPTS = 30
POWER_LOSSES = 3
WRITE_FAULTS = [
    Fault(0, errno.EIO),
    Fault(0, errno.EIO, count=2),
    Fault(0, errno.EIO, count=3),
    Fault(0, errno.EIO, count=12),
    Fault(0, errno.EIO, short=True),
    Fault(0, errno.ENOSPC, short=True),
    Fault(0, errno.ENOSPC, count=2, short=True),
    Fault(0, errno.ENOSPC, count=12, short=True),
]
READ_FAULTS = [Fault(0, errno.EIO), Fault(0, errno.EIO, count=2)]


class Session:
    """A fixed workload whose calls are tried again, or given up, when they raise."""

    def __init__(self, seed: str, fault: Fault | None = None, *, reading: bool = False) -> None:
        self.disk = SimulatedDisk(seed)
        self.disk.make_directory(FOLDER.parent)
        self.disk.sync_directory(Path("/"))
        self.oracle = Oracle()
        self.budget = Budget()
        self.errors = 0
        self._reading = reading
        self._chance = random.Random(seed)
        self._mood = random.Random(f"{seed}/{fault}")
        if fault is not None:
            shifted = Fault(fault.first, fault.error, fault.count, fault.short)
            if reading:
                self.disk.read_fault = shifted
            else:
                shifted.first += self.disk.operations
                self.disk.fault = shifted

    def run(self) -> None:
        """Raises: Violation."""
        store = self._open()
        store = self._work(store)
        store.close()
        store = self._open()
        self._put(store, 1, 1)
        store.close()
        self._require_closed()
        self.disk.fault = self.disk.read_fault = None
        for _ in range(POWER_LOSSES):
            found = self.disk.crash(self._chance)
            self.oracle.copy().check_restart(open_store(found))

    def _work(self, store: BlockStore) -> BlockStore:
        self._put(store, 3, 0)
        self._put(store, 2, 1)
        self._drop(store, 3)
        self._put(store, 4, 0)
        self._call(store, store.compact)
        self._drop(store, 3)
        store.close()
        store = self._open()
        self._put(store, 2, 2)
        store.close()
        store = self._open(other_rows=True)
        self._call(store, store.compact)
        return store

    def _open(self, *, other_rows: bool = False) -> BlockStore:
        for _ in range(MAX_ATTEMPTS):
            budget = Budget()
            try:
                store = open_store(self.disk, budget=budget, other_rows=other_rows)
            except REFUSALS:
                self.errors += 1
                self._require_closed()
                if budget.used_bytes:
                    raise Violation("a failed open kept its share of the budget") from None
                continue
            self._check(partial(self.oracle.check_restart, store))
            return store
        raise Violation("the store cannot be opened although the disk works again")

    def _put(self, store: BlockStore, new: int, replaced: int) -> None:
        first = self.oracle.next_number
        numbers = [*range(first, first + new)]
        live = sorted(self.oracle.settled)
        numbers += self._chance.sample(live, min(replaced, len(live)))

        def put() -> None:
            batch = [self.oracle.offer(number) for number in numbers]
            self.oracle.begin({offered.number: offered for offered in batch})
            store.put([offered.new_block(store.shape) for offered in batch])

        self._call(store, put)

    def _drop(self, store: BlockStore, count: int) -> None:
        live = sorted(self.oracle.settled)
        numbers = self._chance.sample(live, min(count, len(live)))

        def drop() -> None:
            self.oracle.begin(dict.fromkeys(numbers))
            store.drop(numbers)

        self._call(store, drop)

    def _call(self, store: BlockStore, call: Callable[[], None]) -> None:
        """Until it succeeds; or, as the mood is, put other blocks instead."""
        for _ in range(MAX_ATTEMPTS):
            try:
                call()
            except REFUSALS:
                self.errors += 1
                self.oracle.fail()
                self._check(partial(self.oracle.check_running, store))
                if self._mood.random() < 0.3:
                    return self._put(store, new=2, replaced=0)
            else:
                self.oracle.acknowledge()
                return self._check(partial(self.oracle.check_running, store))
        raise Violation(f"{call.__name__} still fails although the disk works again")

    def _check(self, check: Callable[[], None]) -> None:
        """Checks read, and reads may fail too: a row that cannot be read counts as damaged."""
        for _ in range(MAX_ATTEMPTS):
            try:
                return check()
            except (OSError, Damaged):
                if not self._reading:
                    raise
                self.errors += 1
        raise Violation("reads still fail although the disk works again")

    def _require_closed(self) -> None:
        if self.disk.open_files:
            raise Violation(f"{self.disk.open_files} files were not closed")


def sweep(seed: int, workloads: int, *, stride: int = 1, max_violations: int = 20) -> Report:
    """Fail every operation and every read of some workloads (or every `stride`-th of them, other
    ones for each kind of fault)."""
    report = Report("io-errors", seed, "faults")
    for workload in range(workloads):
        name = f"{seed}/{workload}"
        clean = Session(name)
        clean.run()
        report.count("workloads")
        for faults, reading, total in (
            (WRITE_FAULTS, False, clean.disk.operations),
            (READ_FAULTS, True, clean.disk.reads),
        ):
            for kind, fault in enumerate(faults):
                for first in range(kind % stride, total, stride):
                    placed = Fault(first, fault.error, fault.count, fault.short)
                    end_when_stuck()
                    _run_one(report, name, placed, reading)
                    if len(report.violations) >= max_violations:
                        return report
    return report


def _run_one(report: Report, name: str, fault: Fault, reading: bool) -> None:
    session = Session(name, fault, reading=reading)
    report.count("faults")
    try:
        session.run()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        report.violations.append(
            f"workload {name}, {'reads' if reading else 'operations'} {fault}: "
            f"{type(error).__name__}: {error} [{Path(where.filename).name}:{where.lineno}]"
        )
    report.count("errors raised", session.errors)


def main() -> None:
    options = arguments("io-errors", workloads=10)
    finish(sweep(options.seed, options.workloads))


if __name__ == "__main__":
    main()
