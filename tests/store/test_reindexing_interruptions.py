"""Making rows anew is cut off, or fails, at any operation: the store has the old rows or the new
ones, with every block, and can be taken to the new ones."""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from kvws.errors import DiskTierFull
from kvws.store.block_store import BlockStore
from kvws.store.rank_manifest import write_layout
from kvws.store.reindexing import NewRows
from tests.store.campaigns.oracle import (
    FOLDER,
    OTHER_ROWS,
    SHAPE,
    Budget,
    Oracle,
    open_store,
)
from tests.store.simulated_disk import Fault, SimulatedDisk

OUTCOMES = 12
"""Power losses tried in front of each operation."""


def put(store: BlockStore, oracle: Oracle, numbers: range) -> None:
    batch = [oracle.offer(number) for number in numbers]
    oracle.begin({offered.number: offered for offered in batch})
    store.put([offered.new_block(store.shape) for offered in batch])
    oracle.acknowledge()


def stored(seed: int = 1) -> tuple[SimulatedDisk, Oracle]:
    """A closed store of several segments, with gaps, whose old rows are not all of one life."""
    disk, oracle = SimulatedDisk(seed), Oracle()
    disk.make_directory(FOLDER.parent)
    disk.sync_directory(Path("/"))
    store = open_store(disk)
    put(store, oracle, range(5))
    put(store, oracle, range(5, 11))
    put(store, oracle, range(2, 4))
    store.drop([6, 7])
    del oracle.settled[6], oracle.settled[7]
    store.close()
    return disk, oracle


def opened_as_found(disk: SimulatedDisk, oracle: Oracle, *, other_rows: bool = False) -> str:
    """Open and check a store, and close it. Returns the format of its rows."""
    store = open_store(disk, other_rows=other_rows)
    oracle.copy().check_restart(store)
    store.close()
    assert disk.open_files == 0
    return store.shape.row_format


def lose_power_everywhere(
    disk: SimulatedDisk, oracle: Oracle, work: Callable[[], object]
) -> tuple[Counter[str], list[str]]:
    """What the stores had that were found in front of each operation, and what was wrong."""
    found_formats: Counter[str] = Counter()
    violations: list[str] = []
    chance = random.Random(1)

    def lose_power(operation: str, path: Path) -> None:
        for outcome in range(OUTCOMES):
            found = disk.crash(chance) if outcome else disk.kill()
            try:
                found_format = opened_as_found(found, oracle)
                found_formats[found_format] += 1
                if found_format == SHAPE.row_format:
                    again = opened_as_found(found, oracle, other_rows=True)
                    assert again == OTHER_ROWS.row_format
            except Exception as error:
                violations.append(f"before {operation} {path.name}: {error!r}")

    disk.before_operation = lose_power
    work()
    disk.before_operation = None
    return found_formats, violations


def test_power_loss_at_every_operation_leaves_the_old_rows_or_the_new_ones() -> None:
    disk, oracle = stored()
    found, violations = lose_power_everywhere(
        disk, oracle, lambda: opened_as_found(disk, oracle, other_rows=True)
    )
    assert not violations, violations[:5]
    assert found.keys() == {SHAPE.row_format, OTHER_ROWS.row_format}
    assert found[SHAPE.row_format] > 10 * OUTCOMES


def test_new_rows_are_durable_when_the_store_is_open() -> None:
    disk, oracle = stored()
    store = open_store(disk, other_rows=True)
    for seed in range(100):
        found = disk.crash(random.Random(seed))
        assert opened_as_found(found, oracle) == OTHER_ROWS.row_format
    store.close()


def test_blocks_put_after_rows_were_made_anew_survive_like_any_others() -> None:
    disk, oracle = stored()
    store = open_store(disk, other_rows=True)
    put(store, oracle, range(20, 23))
    for seed in range(100):
        found = disk.crash(random.Random(seed))
        assert opened_as_found(found, oracle) == OTHER_ROWS.row_format
    store.close()


@pytest.mark.parametrize("planted", ["rows-", "index.1", "MANIFEST", "directory"])
def test_control_a_commit_without_one_of_its_syncs_is_caught(planted: str) -> None:
    disk, oracle = stored()
    disk.ignored_syncs = (planted,)
    _, violations = lose_power_everywhere(
        disk, oracle, lambda: opened_as_found(disk, oracle, other_rows=True)
    )
    assert violations, "the planted fault was not found"


def test_control_a_commit_before_the_new_rows_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    write = NewRows._write

    def commit_first(rows: NewRows, *arguments: object) -> object:
        write_layout(rows._storage, rows._directory, rows._new, 0)
        return write(rows, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(NewRows, "_write", commit_first)
    disk, oracle = stored()
    _, violations = lose_power_everywhere(
        disk, oracle, lambda: opened_as_found(disk, oracle, other_rows=True)
    )
    assert violations, "the planted fault was not found"


def operations_of_reindexing() -> int:
    disk, oracle = stored()
    before = disk.operations
    opened_as_found(disk, oracle, other_rows=True)
    return disk.operations - before


@pytest.mark.parametrize(
    ("error", "count", "short"),
    [
        (errno.EIO, 1, False),
        (errno.EIO, 6, False),
        (errno.ENOSPC, 1, True),
        (errno.ENOSPC, 9, True),
    ],
)
def test_an_error_at_every_operation_leaves_the_old_rows_or_the_new_ones(
    error: int, count: int, short: bool
) -> None:
    raised: Counter[type[Exception]] = Counter()
    found_formats: Counter[str] = Counter()
    for first in range(operations_of_reindexing()):
        disk, oracle = stored()
        disk.fault = Fault(disk.operations + first, error, count, short)
        budget = Budget()
        try:
            store = open_store(disk, budget=budget, other_rows=True)
        except (OSError, DiskTierFull) as refusal:
            raised[type(refusal)] += 1
            assert budget.used_bytes == 0 and disk.open_files == 0
            disk.fault = None
            lost = disk.crash(random.Random(first))
            assert opened_as_found(lost, oracle) in (SHAPE.row_format, OTHER_ROWS.row_format)
            found_formats[opened_as_found(disk, oracle)] += 1
        else:
            oracle.copy().check_restart(store)
            store.close()
    assert sum(raised.values()) > 15
    assert (DiskTierFull in raised) == (error == errno.ENOSPC)
    assert found_formats[SHAPE.row_format] > 15


def test_after_an_error_nothing_of_the_new_rows_is_left_once_the_store_was_opened() -> None:
    for first in range(operations_of_reindexing()):
        disk, oracle = stored()
        before = disk.list_directory(FOLDER)
        disk.fault = Fault(disk.operations + first, count=30)
        try:
            opened_as_found(disk, oracle, other_rows=True)
        except OSError:
            disk.fault = None
            if opened_as_found(disk, oracle) == SHAPE.row_format:
                names = disk.list_directory(FOLDER)
                assert [name for name in names if name != "MANIFEST.tmp"] == before
