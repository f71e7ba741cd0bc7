"""A store against a dict, under any sequence of calls, faults and restarts."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvws.errors import DiskTierFull
from tests.store.campaigns.oracle import FOLDER, RUN_BLOCKS, Oracle, open_store
from tests.store.simulated_disk import Fault, SimulatedDisk

SEEDS = st.integers(0, 2**32 - 1)


class StoreAgainstDict(RuleBasedStateMachine):
    """The rules are what a program, a disk and a power supply can do."""

    @initialize(seed=SEEDS)
    def begin(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.disk = SimulatedDisk(seed)
        self.disk.make_directory(FOLDER.parent)
        self.disk.sync_directory(Path("/"))
        self.oracle = Oracle()
        self.store = open_store(self.disk)

    @rule(new=st.integers(0, 6), replaced=st.integers(0, 3))
    def put(self, new: int, replaced: int) -> None:
        live = sorted(self.oracle.settled)
        first = self.oracle.next_number
        numbers = [*range(first, first + new)]
        numbers += self.chance.sample(live, min(replaced, len(live)))
        batch = [self.oracle.offer(number) for number in numbers]
        self.oracle.begin({offered.number: offered for offered in batch})
        shape = self.store.shape
        self._call(lambda: self.store.put([offered.new_block(shape) for offered in batch]))

    @precondition(lambda self: self.oracle.settled)
    @rule(count=st.integers(1, 8))
    def drop(self, count: int) -> None:
        live = sorted(self.oracle.settled)
        numbers = self.chance.sample(live, min(count, len(live)))
        self.oracle.begin(dict.fromkeys(numbers))
        self._call(lambda: self.store.drop(numbers))

    @rule()
    def compact(self) -> None:
        self._call(self.store.compact)

    @rule()
    def verify(self) -> None:
        self.disk.read_fault = None
        self.store.verify()

    @precondition(lambda self: self.oracle.settled)
    @rule()
    def read_some_with_a_failing_disk(self) -> None:
        live = sorted(self.oracle.settled)
        runs = self.store.plan_reads(live, RUN_BLOCKS)
        run = self.chance.choice(runs)
        self.disk.read_fault = Fault(self.disk.reads)
        buffers = [memoryview(bytearray(4096)) for _ in run]
        try:
            self.store.read(run, buffers)
        except OSError:
            self.disk.read_fault = None
            self.store.read(run, buffers)
        payloads = [self.oracle.settled[number].payload for number in run]
        assert [bytes(buffer) for buffer in buffers] == payloads

    @rule(
        after=st.integers(0, 8),
        error=st.sampled_from((errno.EIO, errno.ENOSPC)),
        count=st.integers(1, 4),
        short=st.booleans(),
    )
    def break_the_disk(self, after: int, error: int, count: int, short: bool) -> None:
        self.disk.fault = Fault(self.disk.operations + after, error, count, short)

    @rule()
    def restart(self) -> None:
        self.store.close()
        assert self.disk.open_files == 0
        self._open()

    @rule()
    def reindex(self) -> None:
        self.store.close()
        assert self.disk.open_files == 0
        self._open(other_rows=True)

    @rule()
    def kill(self) -> None:
        self.disk = self.disk.kill()
        self._open()

    @rule(seed=SEEDS)
    def lose_power(self, seed: int) -> None:
        self.disk = self.disk.crash(random.Random(seed))
        self._open()

    @rule(seed=SEEDS, after=st.integers(0, 12))
    def lose_power_soon(self, seed: int, after: int) -> None:
        """Within the next calls; the disk is swapped for the one that would be found."""
        found: list[tuple[SimulatedDisk, Oracle]] = []
        begin = self.disk.operations

        def look(*_: object) -> None:
            if not found and self.disk.operations - begin >= after:
                found.append((self.disk.crash(random.Random(seed)), self.oracle.copy()))

        self.disk.before_operation = look
        self.put(new=3, replaced=2)
        self.drop(count=2) if self.oracle.settled else None
        self.reindex()
        self.disk.before_operation = None
        if found:
            self.disk, self.oracle = found[0]
            self._open()

    @invariant()
    def holds_what_was_acknowledged(self) -> None:
        if hasattr(self, "store"):
            self.disk.read_fault = None
            self.oracle.check_running(self.store)

    def _call(self, call: Callable[[], None]) -> None:
        try:
            call()
        except (OSError, DiskTierFull):
            self.oracle.fail()
        else:
            self.oracle.acknowledge()

    def _open(self, *, other_rows: bool = False) -> None:
        try:
            self.store = open_store(self.disk, other_rows=other_rows)
        except (OSError, DiskTierFull):
            assert self.disk.open_files == 0
            self.disk.fault = None
            self.store = open_store(self.disk, other_rows=other_rows)
        self.oracle.check_restart(self.store)


TestStoreAgainstDict = StoreAgainstDict.TestCase
TestStoreAgainstDict.settings = settings(
    max_examples=int(os.environ.get("KVWS_EXAMPLES", "60")),
    stateful_step_count=25,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
