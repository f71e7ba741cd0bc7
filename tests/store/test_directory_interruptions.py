"""What a crash, a full disk or a power loss leaves of a store directory."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvws.store.directory import StoreDirectory
from kvws.store.posix import PosixStorage
from tests.store.folders import IDENTITY, tree_hash


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    return PosixStorage(tmp_path)


@pytest.fixture
def directory(root: Path, storage: PosixStorage) -> Iterator[StoreDirectory]:
    with StoreDirectory.open(root, storage) as opened:
        yield opened


class PowerFails(Exception):
    """The process dies here."""


class FailingStorage(PosixStorage):
    """Real files; after some changes the next one raises, before it is made."""

    error: Exception | None = None
    changes_left = 0

    def fail_after(self, changes: int, error: Exception) -> None:
        self.changes_left, self.error = changes, error

    def _count(self) -> None:
        if self.error is not None and self.changes_left == 0:
            raise self.error
        self.changes_left -= 1

    def make_directory(self, path: Path) -> None:
        self._count()
        super().make_directory(path)

    def rename(self, old: Path, new: Path) -> None:
        self._count()
        super().rename(old, new)

    def unlink(self, path: Path) -> None:
        self._count()
        super().unlink(path)

    def remove_directory(self, path: Path) -> None:
        self._count()
        super().remove_directory(path)

    def sync_directory(self, path: Path) -> None:
        self._count()
        super().sync_directory(path)


def every_interruption(
    root: Path, action: Callable[[StoreDirectory], object], error: Exception
) -> Iterator[StoreDirectory]:
    """Interrupt an action before each of its changes; yields the directory opened afterwards.

    The caller brings the directory back to the state that the action begins with.
    """
    for changes in range(100):
        failing = FailingStorage(root)
        directory = StoreDirectory.open(root, failing)
        failing.fail_after(changes, error)
        try:
            action(directory)
        except type(error):
            pass
        else:
            assert changes > 3, "nothing was interrupted"
            return
        finally:
            directory.close()
        with StoreDirectory.open(root, PosixStorage(root)) as reopened:
            yield reopened
    raise AssertionError("the action never came to its end")


@pytest.mark.parametrize("error", [PowerFails(), OSError(errno.ENOSPC, "No space left")])
def test_a_workspace_whose_making_was_interrupted_can_be_opened_or_collected(
    root: Path, error: Exception
) -> None:
    def make(directory: StoreDirectory) -> None:
        directory.open_workspace("w", IDENTITY)

    collected = 0
    for directory in every_interruption(root, make, error):
        report = directory.collect_garbage()
        assert not report.problems
        collected += report.unfinished
        assert all(entry.problem is None for entry in directory.list_workspaces())
        path = directory.open_workspace("w", IDENTITY)
        assert [entry.path for entry in directory.list_workspaces()] == [path]
        directory.remove("w")
    assert collected


class WatchedStorage(PosixStorage):
    """Real files; knows the directories whose names are not durable yet."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.unsynced: set[Path] = set()
        self.synced: set[Path] = set()

    def make_directory(self, path: Path) -> None:
        super().make_directory(path)
        self.unsynced.add(path.parent)

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self.unsynced |= {old.parent, new.parent}

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self.unsynced.discard(path)
        self.synced.add(path)


def test_what_was_opened_or_removed_outlives_a_power_loss(tmp_path: Path) -> None:
    root = tmp_path / "a" / "store"
    storage = WatchedStorage(tmp_path)
    with StoreDirectory.open(root, storage) as directory:
        assert storage.synced >= {tmp_path, root.parent, root}
        assert not storage.unsynced
        path = directory.open_workspace("w", IDENTITY)
        assert storage.synced >= {path, root}
        assert not storage.unsynced
        storage.synced.clear()
        directory.remove("w")
        assert root in storage.synced
        assert not storage.unsynced


def test_opening_again_makes_durable_what_a_killed_process_left_in_the_cache(root: Path) -> None:
    with StoreDirectory.open(root, PosixStorage(root)) as directory:
        path = directory.open_workspace("w", IDENTITY)
        directory.storage = storage = WatchedStorage(root)
        directory.open_workspace("w", IDENTITY)
        assert storage.synced >= {path, root}


def fill(path: Path) -> None:
    """Files as a workspace has them, and a link out of it."""
    (path / "session.log").write_bytes(bytes(10_000))
    (path / "cache").mkdir()
    (path / "cache" / "segment-000000.kv").write_bytes(bytes(100_000))
    (path / "cache" / "out").symlink_to(path.parent.parent / "outside")


def test_a_removed_workspace_is_gone_with_all_its_bytes_and_nothing_else(
    directory: StoreDirectory,
) -> None:
    outside = directory.root.parent / "outside"
    outside.write_text("precious")
    kept = directory.open_workspace("kept", IDENTITY)
    before = tree_hash(directory.root)
    fill(directory.open_workspace("w", IDENTITY))
    assert directory.remove("w").name == "w"
    assert tree_hash(directory.root) == before
    assert kept.is_dir() and outside.read_text() == "precious"


def test_an_interrupted_removal_leaves_it_whole_or_gone_and_is_finished_by_the_collector(
    root: Path,
) -> None:
    with StoreDirectory.open(root, PosixStorage(root)) as directory:
        fill(directory.open_workspace("w", IDENTITY))
        whole = tree_hash(directory.workspace_path("w"))
    finished = 0
    for directory in every_interruption(root, lambda d: d.remove("w"), PowerFails()):
        names = [entry.name for entry in directory.list_workspaces()]
        if names:
            assert names == ["w"]
            assert tree_hash(directory.workspace_path("w")) == whole
            directory.remove("w")
        finished += directory.collect_garbage().removals
        assert sorted(os.listdir(root)) == ["LOCK"]
        fill(directory.open_workspace("w", IDENTITY))
    assert finished


def test_a_workspace_can_be_removed_again_beside_the_rest_of_its_predecessor(
    root: Path, storage: PosixStorage
) -> None:
    with StoreDirectory.open(root, storage) as directory:
        fill(directory.open_workspace("w", IDENTITY))
    failing = FailingStorage(root)
    with StoreDirectory.open(root, failing) as directory:
        failing.fail_after(3, PowerFails())
        with pytest.raises(PowerFails):
            directory.remove("w")
    with StoreDirectory.open(root, storage) as directory:
        fill(directory.open_workspace("w", IDENTITY))
        directory.remove("w")
        assert sorted(os.listdir(root)) == ["LOCK"]
