"""The simulated disk loses what a disk may lose, and nothing else."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.store.simulated_disk import Fault, SimulatedDisk

FOLDER = Path("/disk")
LOG = FOLDER / "log"
SEEDS = range(200)
OLD, NEW = b"o" * 2048, b"n" * 2048


def disk_with_old_log() -> SimulatedDisk:
    disk = SimulatedDisk()
    disk.make_directory(FOLDER)
    disk.sync_directory(FOLDER.parent)
    file = disk.open_log(LOG, create=True)
    file.write([memoryview(OLD)], 0)
    file.sync()
    file.close()
    disk.sync_directory(FOLDER)
    return disk


def found(prepare: Callable[[SimulatedDisk], None]) -> list[SimulatedDisk]:
    """What is found after power losses behind `prepare`, one disk per seed."""
    disk = disk_with_old_log()
    prepare(disk)
    return [disk.crash(random.Random(seed)) for seed in SEEDS]


def overwrite(disk: SimulatedDisk, *, offset: int = 0, sync: bool = False) -> None:
    file = disk.open_log(LOG)
    file.write([memoryview(NEW)], offset)
    if sync:
        file.sync()
    file.close()


def test_synced_data_survives() -> None:
    disks = found(lambda disk: overwrite(disk, sync=True))
    assert all(bytes(disk.content(LOG)) == NEW for disk in disks)


def test_unsynced_sectors_are_old_or_new_one_by_one() -> None:
    contents = {bytes(disk.content(LOG)) for disk in found(overwrite)}
    sectors = {tuple(text[i : i + 512] for i in range(0, 2048, 512)) for text in contents}
    assert all(sector in (OLD[:512], NEW[:512]) for parts in sectors for sector in parts)
    assert {OLD, NEW} <= contents
    assert len(contents) > 8


def test_every_version_since_the_last_sync_may_be_found() -> None:
    def twice(disk: SimulatedDisk) -> None:
        overwrite(disk)
        file = disk.open_log(LOG)
        file.write([memoryview(b"m" * 512)], 0)
        file.close()

    assert {bytes(disk.content(LOG)[:1]) for disk in found(twice)} == {b"o", b"n", b"m"}


def test_an_unsynced_append_may_grow_the_file_without_its_data() -> None:
    contents = [bytes(d.content(LOG)) for d in found(lambda disk: overwrite(disk, offset=2048))]
    assert all(text.startswith(OLD) for text in contents)
    assert {2048, 4096} <= {len(text) for text in contents}
    assert any(2048 < len(text) < 4096 for text in contents)
    grown = [text[2048:] for text in contents if len(text) == 4096]
    assert NEW in grown and bytes(2048) in grown
    assert any(set(tail) - {0, ord("n")} for tail in grown), "garbage"


def test_an_unsynced_truncation_may_not_have_happened() -> None:
    def cut(disk: SimulatedDisk) -> None:
        disk.open_log(LOG).truncate(100)

    sizes = {len(disk.content(LOG)) for disk in found(cut)}
    assert {100, 2048} <= sizes


def test_a_rename_without_directory_sync_may_vanish_or_come_before_the_data() -> None:
    def replace(disk: SimulatedDisk) -> None:
        file = disk.open_log(FOLDER / "tmp", create=True)
        file.write([memoryview(NEW)], 0)
        disk.rename(FOLDER / "tmp", LOG)

    contents = {bytes(disk.content(LOG)) for disk in found(replace)}
    assert {OLD, NEW, b""} <= contents


def test_a_directory_sync_makes_a_rename_durable_but_not_the_data() -> None:
    def replace(disk: SimulatedDisk) -> None:
        disk.open_log(FOLDER / "tmp", create=True).write([memoryview(NEW)], 0)
        disk.rename(FOLDER / "tmp", LOG)
        disk.sync_directory(FOLDER)

    disks = found(replace)
    assert all(disk.list_directory(FOLDER) == ["log"] for disk in disks)
    contents = {bytes(disk.content(LOG)) for disk in disks}
    assert OLD not in contents and b"" in contents


def test_unsynced_creations_and_removals_survive_in_any_subset() -> None:
    def change(disk: SimulatedDisk) -> None:
        disk.unlink(LOG)
        disk.open_segment(FOLDER / "new", create_bytes=4096).sync()

    names = {tuple(disk.list_directory(FOLDER)) for disk in found(change)}
    assert names == {(), ("log",), ("new",), ("log", "new")}


def test_after_a_failed_sync_later_syncs_do_not_help() -> None:
    def fail_and_retry(disk: SimulatedDisk) -> None:
        file = disk.open_log(LOG)
        file.write([memoryview(NEW)], 0)
        disk.fault = Fault(disk.operations)
        with pytest.raises(OSError, match="Input/output"):
            file.sync()
        file.sync()

    contents = {bytes(disk.content(LOG)) for disk in found(fail_and_retry)}
    assert {OLD, NEW} <= contents

    def fail_and_rewrite(disk: SimulatedDisk) -> None:
        fail_and_retry(disk)
        overwrite(disk, sync=True)

    assert {bytes(disk.content(LOG)) for disk in found(fail_and_rewrite)} == {NEW}


def test_a_killed_process_loses_nothing_and_makes_nothing_durable() -> None:
    disk = disk_with_old_log()
    overwrite(disk)
    after = disk.kill()
    assert bytes(after.content(LOG)) == NEW
    later = {bytes(after.crash(random.Random(seed)).content(LOG)) for seed in SEEDS}
    assert {OLD, NEW} <= later


def test_a_crash_leaves_the_running_disk_as_it_is() -> None:
    disk = disk_with_old_log()
    overwrite(disk)
    copy = disk.crash(random.Random(1))
    overwrite(copy, offset=4096, sync=True)
    assert bytes(disk.content(LOG)) == NEW
    assert bytes(copy.crash(random.Random(2)).content(LOG)[4096:]) == NEW


def test_the_same_seed_finds_the_same_disk() -> None:
    disk = disk_with_old_log()
    overwrite(disk, offset=1000)
    first, second = (bytes(disk.crash(random.Random(7)).content(LOG)) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("short", [False, True])
def test_a_failed_write_leaves_a_part(short: bool) -> None:
    lengths = set[int]()
    for seed in SEEDS:
        disk = SimulatedDisk(seed)
        file = disk.open_log(Path("/log"), create=True)
        disk.fault = Fault(disk.operations, errno.ENOSPC, short=short)
        with pytest.raises(OSError, match="No space"):
            file.write([memoryview(NEW)], 0)
        content = bytes(disk.content(Path("/log")))
        lengths.add(len(content))
        assert not short or content == NEW[: len(content)]
        file.write([memoryview(NEW)], 0)
    assert len(lengths) > 3


def test_a_failed_creation_leaves_no_file() -> None:
    disk = disk_with_old_log()
    for number in range(2):
        disk.fault = Fault(disk.operations + number, errno.ENOSPC)
        with pytest.raises(OSError, match="No space"):
            disk.open_segment(FOLDER / "new", create_bytes=4096)
        assert disk.list_directory(FOLDER) == ["log"] and disk.open_files == 0


def test_a_faulty_read_raises_once() -> None:
    disk = disk_with_old_log()
    file = disk.open_log(LOG)
    buffer = memoryview(bytearray(8))
    disk.read_fault = Fault(disk.reads)
    with pytest.raises(OSError, match="Input/output"):
        file.read([buffer], 0)
    file.read([buffer], 0)
    assert bytes(buffer) == OLD[:8]
    with pytest.raises(EOFError):
        file.read([buffer], 2041)


def test_an_ignored_sync_is_none() -> None:
    disk = disk_with_old_log()
    disk.ignored_syncs = ("log", "directory")
    overwrite(disk, sync=True)
    disk.rename(LOG, FOLDER / "other")
    disk.sync_directory(FOLDER)
    disks = [disk.crash(random.Random(seed)) for seed in SEEDS]
    assert {tuple(found.list_directory(FOLDER)) for found in disks} == {("log",), ("other",)}
    assert any(bytes(found.content(LOG)) == OLD for found in disks if found.exists(LOG))
