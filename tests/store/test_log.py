"""Append-only logs: what was synced is found again, what failed never comes back."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kvws.store.log import AppendLog
from kvws.store.posix import PosixStorage
from kvws.store.record import HEADER_BYTES
from kvws.store.storage import Storage
from tests.store.simulated_disk import Fault, Operation, SimulatedDisk

FOLDER = Path("/disk")
LOG = FOLDER / "some.log"
SEED = random.randrange(2**32)


@pytest.fixture
def disk() -> SimulatedDisk:
    print("seed", SEED)
    disk = SimulatedDisk(SEED)
    disk.make_directory(FOLDER)
    disk.sync_directory(Path("/"))
    return disk


def open_log(storage: Storage, path: Path = LOG) -> tuple[AppendLog, list[bytes]]:
    log, scan = AppendLog.open(storage, path)
    return log, [body for _, body in scan.frames]


def found(storage: Storage, path: Path = LOG) -> list[bytes]:
    log, bodies = open_log(storage, path)
    log.close()
    return bodies


def after_power_loss(disk: SimulatedDisk, losses: int = 60) -> list[list[bytes]]:
    """What an open finds after losing power now, in different ways."""
    return [found(disk.crash(random.Random(SEED + n))) for n in range(losses)]


def fail_next(disk: SimulatedDisk, *, skip: int = 0, count: int = 1, short: bool = False) -> None:
    disk.fault = Fault(disk.operations + skip, errno.EIO, count, short)


def put(log: AppendLog, *bodies: bytes) -> None:
    log.append(bodies)
    log.sync()


def test_frames_come_back_in_order_on_real_files(tmp_path: Path) -> None:
    storage, path = PosixStorage(tmp_path), tmp_path / "log"
    log, bodies = open_log(storage, path)
    assert bodies == [] and log.size_bytes == 0
    put(log, b"a", b"")
    put(log, b"c" * 5000)
    assert log.size_bytes == path.stat().st_size == 3 * HEADER_BYTES + 5001
    log.close()
    log, bodies = open_log(storage, path)
    assert bodies == [b"a", b"", b"c" * 5000]
    log.rewrite([b"x"] * 3)
    put(log, b"y")
    log.close()
    assert found(storage, path) == [b"x", b"x", b"x", b"y"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["log"]


def test_a_large_rewrite_is_written_in_pieces(tmp_path: Path) -> None:
    storage, path = PosixStorage(tmp_path), tmp_path / "log"
    bodies = [bytes([n]) * (3 << 20) for n in range(6)]
    log, _ = open_log(storage, path)
    log.rewrite(iter(bodies))
    put(log, b"end")
    log.close()
    assert found(storage, path) == [*bodies, b"end"]


def test_a_torn_tail_is_cut_reported_and_continued(tmp_path: Path) -> None:
    storage, path = PosixStorage(tmp_path), tmp_path / "log"
    log, _ = open_log(storage, path)
    put(log, b"one")
    put(log, b"two")
    log.close()
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        log, scan = AppendLog.open(storage, path)
        assert path.stat().st_size == scan.valid_bytes == log.size_bytes
        assert scan.torn_bytes == length - scan.valid_bytes
        put(log, b"three")
        log.close()
        whole = [b"one"] if length >= HEADER_BYTES + 3 else []
        assert found(storage, path) == [*whole, b"three"]


def test_what_was_synced_survives_power_loss(disk: SimulatedDisk) -> None:
    log, _ = open_log(disk)
    put(log, b"a", b"b")
    log.append([b"unsynced"])
    bodies = after_power_loss(disk)
    assert all(one[:2] == [b"a", b"b"] for one in bodies)
    assert any(len(one) == 2 for one in bodies), "nothing unsynced was ever lost: no test"


def test_what_an_open_finds_is_durable(disk: SimulatedDisk) -> None:
    """The process was killed before its sync; its successor reads the frames from the cache."""
    log, _ = open_log(disk)
    log.append([b"a"])
    successor = disk.kill()
    assert found(successor) == [b"a"]
    assert all(one == [b"a"] for one in after_power_loss(successor))


@pytest.mark.parametrize("short", [False, True])
def test_an_append_that_failed_leaves_nothing_behind(disk: SimulatedDisk, short: bool) -> None:
    log, _ = open_log(disk)
    put(log, b"a")
    fail_next(disk, short=short)
    with pytest.raises(OSError):
        log.append([b"failed" * 1000])
    put(log, b"b")
    assert found(disk.kill()) == [b"a", b"b"]
    assert all(one == [b"a", b"b"] for one in after_power_loss(disk))


def test_a_sync_that_failed_voids_what_was_appended(disk: SimulatedDisk) -> None:
    log, _ = open_log(disk)
    put(log, b"a")
    log.append([b"failed"])
    fail_next(disk)
    with pytest.raises(OSError):
        log.sync()
    assert log.size_bytes == HEADER_BYTES + 1
    assert all(one == [b"a"] for one in after_power_loss(disk)), "it came back"
    put(log, b"b")
    assert all(one == [b"a", b"b"] for one in after_power_loss(disk))


def test_a_frame_that_failed_comes_back_if_the_log_is_not_cut(
    disk: SimulatedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the tests above: the simulated disk does bring such frames back."""
    log, _ = open_log(disk)
    put(log, b"a")
    monkeypatch.setattr(AppendLog, "_cut_back", lambda self: None)
    log.append([b"failed"])
    fail_next(disk)
    with pytest.raises(OSError):
        log.sync()
    assert [b"a", b"failed"] in after_power_loss(disk)


def test_while_the_disk_fails_the_log_takes_no_frames_and_heals_afterwards(
    disk: SimulatedDisk,
) -> None:
    log, _ = open_log(disk)
    put(log, b"a")
    fail_next(disk, count=1_000)
    for _ in range(3):
        with pytest.raises(OSError):
            log.append([b"failed"])
        with pytest.raises(OSError):
            log.heal()
    disk.fault = None
    log.heal()
    put(log, b"b")
    assert all(one == [b"a", b"b"] for one in after_power_loss(disk))


def test_a_rewrite_leaves_the_old_log_or_the_new_one(disk: SimulatedDisk) -> None:
    log, _ = open_log(disk)
    old, new = [b"old 1", b"old 2", b"old 3"], [b"new"]
    put(log, *old)
    outcomes: list[list[bytes]] = []

    def crash_before(operation: Operation, path: Path) -> None:
        for n in range(20):
            successor = disk.crash(random.Random(SEED + n))
            outcomes.append(found(successor))
            assert successor.list_directory(FOLDER) == [LOG.name]

    disk.before_operation = crash_before
    log.rewrite(new)
    disk.before_operation = None
    assert old in outcomes and new in outcomes
    assert all(one in (old, new) for one in outcomes)
    put(log, b"more")
    assert all(one == [*new, b"more"] for one in after_power_loss(disk))


def operations_of(action: Callable[[], None], disk: SimulatedDisk) -> int:
    before = disk.operations
    action()
    return disk.operations - before


def test_a_rewrite_that_fails_anywhere_loses_nothing(disk: SimulatedDisk) -> None:
    log, _ = open_log(disk)
    put(log, b"same")
    operations = operations_of(lambda: log.rewrite([b"same"]), disk)
    for failing in range(operations):
        fail_next(disk, skip=failing)
        with pytest.raises(OSError):
            log.rewrite([b"same"])
        assert all(one == [b"same"] for one in after_power_loss(disk, 20)), failing
        put(log, b"more")
        assert all(one == [b"same", b"more"] for one in after_power_loss(disk, 20)), failing
        log.rewrite([b"same"])


def test_a_rename_that_fails_after_it_was_done_is_followed(
    disk: SimulatedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, _ = open_log(disk)
    put(log, b"old")

    def rename(old: Path, new: Path) -> None:
        SimulatedDisk.rename(disk, old, new)
        raise OSError(errno.EIO, "no answer")

    monkeypatch.setattr(disk, "rename", rename)
    log.rewrite([b"new"])
    put(log, b"more")
    assert all(one == [b"new", b"more"] for one in after_power_loss(disk))


def test_an_open_that_fails_leaves_no_file_open(disk: SimulatedDisk) -> None:
    log, _ = open_log(disk)
    put(log, b"a")
    log.append([b"torn"])
    log.close()
    del disk.content(LOG)[-1:]
    for failing in range(3):  # truncate, sync, sync of the directory
        damaged = disk.kill()
        fail_next(damaged, skip=failing)
        with pytest.raises(OSError):
            open_log(damaged)
        assert damaged.open_files == 0
    disk.read_fault = Fault(disk.reads)
    with pytest.raises(OSError):
        open_log(disk)
    assert disk.open_files == 0
    assert found(disk) == [b"a"]
