"""Random work on a store that loses power in front of every operation of its disk.

Each crash point of a workload is tried in place: the disk as a power loss (or, now and then, a
kill) would leave it is opened as a second store and compared with the oracle, while the first
store goes on. Some of the found disks are worked on further, with crash points of their own from
the first operation of the recovery on. With `faults`, operations also fail in between.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvws.store.block_store import BlockStore
from tests.store.campaigns.oracle import FOLDER, Content, Oracle, Violation, open_store
from tests.store.campaigns.report import Report, arguments, end_when_stuck, finish
from tests.store.simulated_disk import Fault, Operation, SimulatedDisk

MAX_DEPTH = 3
MAX_LIVE_BLOCKS = 14
STEPS = 14
NESTED_STEPS = 3
NESTED_SHARE = 0.02
KILL_SHARE = 0.15
FAULT_SHARE = 0.4


@dataclass
class World:
    """A disk, the store on it, and what that store must hold."""

    disk: SimulatedDisk
    oracle: Oracle
    chance: random.Random
    depth: int

    def open(self, *, other_rows: bool = False) -> BlockStore:
        try:
            store = open_store(self.disk, other_rows=other_rows)
        except OSError:
            if self.disk.fault is None:
                raise
            self.disk.fault = None
            store = open_store(self.disk, other_rows=other_rows)
        self.oracle.check_restart(store)
        return store

    def attempt(self, call: Callable[[], None]) -> None:
        """What the oracle holds to be in flight; it may fail when the disk does."""
        try:
            call()
        except OSError:
            if self.disk.fault is None:
                raise
            self.oracle.fail()
        else:
            self.oracle.acknowledge()


class PowerLoss:
    """The campaign.

    Args:
        outcomes: different power losses tried at each crash point.
        faults: operations fail with EIO, too.
        ignored_syncs: planted fault: see `SimulatedDisk`.
        early_acknowledgement: planted fault: what is put counts as acknowledged at once.
    """

    def __init__(
        self,
        seed: int,
        *,
        outcomes: int = 2,
        faults: bool = False,
        ignored_syncs: tuple[str, ...] = (),
        early_acknowledgement: bool = False,
    ) -> None:
        self.report = Report("power-loss", seed, "points")
        self._outcomes = outcomes
        self._faults = faults
        self._ignored_syncs = ignored_syncs
        self._early_acknowledgement = early_acknowledgement
        self._workload = 0

    def run(self, points: int, first_workload: int = 0, max_violations: int = 20) -> Report:
        self._workload = first_workload
        while self.report.counts.get("points", 0) < points:
            end_when_stuck()
            self._run_workload()
            self._workload += 1
            self.report.count("workloads")
            if len(self.report.violations) >= max_violations:
                break
        return self.report

    def _run_workload(self) -> None:
        seed = f"{self.report.seed}/{self._workload}"
        disk = SimulatedDisk(seed)
        disk.make_directory(FOLDER.parent)
        disk.sync_directory(Path("/"))
        disk.ignored_syncs = self._ignored_syncs
        self._work(World(disk, Oracle(), random.Random(seed), depth=0), STEPS, "the workload")

    def _work(self, world: World, steps: int, place: str) -> None:
        """Open the store, check it, and go on working with crash points everywhere."""
        if steps and world.depth < MAX_DEPTH:
            world.disk.before_operation = lambda *operation: self._lose_power(world, *operation)
        try:
            store = world.open()
            for _ in range(steps):
                store = self._step(world, store)
            store.close()
            if world.disk.open_files:
                raise Violation(f"{world.disk.open_files} files were not closed")
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            self.report.violations.append(
                f"workload {self._workload}, {place}: {type(error).__name__}: {error} "
                f"[{Path(where.filename).name}:{where.lineno}]"
            )

    def _lose_power(self, world: World, operation: Operation, path: Path) -> None:
        if self.report.violations:
            return
        self.report.count("operations")
        for _ in range(self._outcomes):
            point = self.report.counts.get("points", 0)
            self.report.count("points")
            chance = random.Random(world.chance.getrandbits(64))
            killed = chance.random() < KILL_SHARE
            found = world.disk.kill() if killed else world.disk.crash(chance)
            further = chance.random() < NESTED_SHARE
            self._work(
                World(found, world.oracle.copy(), chance, world.depth + 1),
                NESTED_STEPS if further else 0,
                f"point {point}, {'kill' if killed else 'power loss'} of depth {world.depth} "
                f"before {operation} {path.name}",
            )

    def _step(self, world: World, store: BlockStore) -> BlockStore:
        oracle, chance = world.oracle, world.chance
        if self._faults and chance.random() < FAULT_SHARE:
            first = world.disk.operations + chance.randint(0, 10)
            only = chance.choice(("", "index.log"))
            world.disk.fault = Fault(first, count=chance.randint(1, 3), only=only)
        kinds = ("put", "put", "put", "replace", "drop", "compact", "reopen", "reindex", "restart")
        kind = chance.choice(kinds)
        if len(oracle.settled) > MAX_LIVE_BLOCKS:
            kind = "drop"
        if kind == "put" or (kind == "replace" and not oracle.settled):
            self._put(world, store, range(oracle.next_number, oracle.next_number + 4), 0)
        elif kind == "replace":
            self._put(world, store, range(oracle.next_number, oracle.next_number + 1), 2)
        elif kind == "drop" and oracle.settled:
            live = sorted(oracle.settled)
            numbers = chance.sample(live, chance.randint(1, max(1, len(live) // 2)))
            oracle.begin(dict.fromkeys(numbers))
            world.attempt(lambda: store.drop(numbers))
        elif kind == "compact":
            world.attempt(store.compact)
        elif kind in ("reopen", "reindex"):
            store.close()
            return world.open(other_rows=kind == "reindex")
        elif kind == "restart":
            killed = chance.random() < KILL_SHARE
            hook = world.disk.before_operation
            world.disk = world.disk.kill() if killed else world.disk.crash(chance)
            world.disk.before_operation = hook
            return world.open()
        return store

    def _put(self, world: World, store: BlockStore, new: range, replaced: int) -> None:
        oracle, chance = world.oracle, world.chance
        numbers = list(new[: chance.randint(0 if replaced else 1, len(new))])
        live = sorted(oracle.settled)
        if replaced:
            numbers += chance.sample(live, min(replaced, len(live)))
        chance.shuffle(numbers)
        batch = [oracle.offer(number) for number in numbers]
        operation: dict[int, Content | None] = {offered.number: offered for offered in batch}
        oracle.begin(operation)
        if self._early_acknowledgement:
            oracle.acknowledge()
        world.attempt(lambda: store.put([offered.new_block(store.shape) for offered in batch]))


def main() -> None:
    options = arguments("power-loss", points=1_000_000, outcomes=2, first_workload=0, faults=0)
    campaign = PowerLoss(
        options.seed, outcomes=options.outcomes, faults=bool(options.faults)
    )
    finish(campaign.run(options.points, options.first_workload, max_violations=1))


if __name__ == "__main__":
    main()
