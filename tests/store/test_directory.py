"""The store directory: one owner, and a clear refusal of all that is no store."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvws.errors import ConfigError, StoreFormatError, StoreInUse, UnsafeStore
from kvws.store.directory import StoreDirectory
from kvws.store.listing import list_workspaces
from kvws.store.posix import PosixStorage
from tests.store.folders import IDENTITY, assert_refused


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    return PosixStorage(tmp_path)


def test_a_missing_directory_is_made_private_with_those_above_it(
    tmp_path: Path, storage: PosixStorage
) -> None:
    root = tmp_path / "a" / "b" / "store"
    StoreDirectory.open(root, storage).close()
    assert root.stat().st_mode & 0o777 == 0o700
    assert (root / "LOCK").stat().st_mode & 0o777 == 0o600


def test_a_missing_directory_is_an_error_unless_it_may_be_made(
    tmp_path: Path, storage: PosixStorage
) -> None:
    def open_it() -> None:
        StoreDirectory.open(tmp_path / "none", storage, create=False)

    assert_refused(ConfigError, tmp_path, open_it, "none", "--disk-dir")


def test_a_link_to_a_directory_is_refused(root: Path, storage: PosixStorage) -> None:
    root.mkdir()
    link = root.with_name("link")
    link.symlink_to(root)
    assert_refused(UnsafeStore, root, lambda: StoreDirectory.open(link, storage), str(root))


@pytest.mark.parametrize("mode", [0o770, 0o720, 0o707, 0o702, 0o777])
def test_a_directory_that_others_can_write_to_is_refused(
    root: Path, storage: PosixStorage, mode: int
) -> None:
    root.mkdir()
    root.chmod(mode)
    assert_refused(
        UnsafeStore, root, lambda: StoreDirectory.open(root, storage), f"chmod go-w {root}"
    )


def test_a_directory_of_another_user_is_refused(
    root: Path, storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.mkdir()
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    assert_refused(UnsafeStore, root, lambda: StoreDirectory.open(root, storage), str(other))


@pytest.mark.parametrize("mode", [0o500, 0o400, 0o600])
def test_a_read_only_directory_is_refused_even_for_root(
    root: Path, storage: PosixStorage, mode: int
) -> None:
    root.mkdir()
    root.chmod(mode)
    assert_refused(ConfigError, root, lambda: StoreDirectory.open(root, storage), "--disk-dir")
    root.chmod(0o700)


def test_a_file_is_refused(root: Path, storage: PosixStorage) -> None:
    root.write_bytes(b"not a folder")
    assert_refused(StoreFormatError, root.parent, lambda: StoreDirectory.open(root, storage))
    below = root / "store"
    assert_refused(ConfigError, root.parent, lambda: StoreDirectory.open(below, storage))


def test_somebody_s_home_is_refused(root: Path, storage: PosixStorage) -> None:
    root.mkdir()
    (root / "thesis.tex").write_text("years of work")
    assert_refused(
        StoreFormatError, root, lambda: StoreDirectory.open(root, storage), "thesis.tex", "empty"
    )


def test_the_directory_of_a_database_with_a_lock_of_its_own_is_refused(
    root: Path, storage: PosixStorage
) -> None:
    root.mkdir()
    (root / "LOCK").touch()
    (root / "CURRENT").write_text("MANIFEST-000001")
    assert_refused(StoreFormatError, root, lambda: StoreDirectory.open(root, storage), "CURRENT")


def test_folders_that_only_look_like_workspaces_are_refused(
    root: Path, storage: PosixStorage
) -> None:
    (root / "d41d8cd98f00b204e9800998ecf8427e").mkdir(parents=True)
    assert_refused(StoreFormatError, root, lambda: StoreDirectory.open(root, storage))


def test_a_store_stays_ours_with_a_note_in_it_or_without_its_lock_file(
    root: Path, storage: PosixStorage
) -> None:
    with StoreDirectory.open(root, storage) as directory:
        directory.open_workspace("w", IDENTITY)
    (root / "README").write_text("sessions of the build agent")
    StoreDirectory.open(root, storage).close()
    (root / "README").unlink()
    (root / "LOCK").unlink()
    StoreDirectory.open(root, storage).close()


def test_a_lock_that_is_a_link_is_refused(root: Path, storage: PosixStorage) -> None:
    root.mkdir()
    victim = root.with_name("victim")
    victim.write_text("precious")
    (root / "LOCK").symlink_to(victim)
    assert_refused(
        UnsafeStore, root.parent, lambda: StoreDirectory.open(root, storage), "LOCK"
    )


# --- one owner

HOLD = """
import sys
from pathlib import Path
from kvws.store.directory import StoreDirectory
from kvws.store.posix import PosixStorage
root = Path(sys.argv[1])
directory = StoreDirectory.open(root, PosixStorage(root))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(root: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that owns the directory."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_process_is_told_who_owns_it_and_may_only_look(
    holder: subprocess.Popen[str], root: Path, storage: PosixStorage
) -> None:
    def open_it() -> None:
        StoreDirectory.open(root, storage)

    host = os.uname().nodename
    assert_refused(StoreInUse, root, open_it, f"process {holder.pid}", host, "--disk-dir")
    assert list_workspaces(root, storage) == []


def test_the_kernel_releases_the_lock_of_a_process_that_was_killed(
    holder: subprocess.Popen[str], root: Path, storage: PosixStorage
) -> None:
    holder.kill()
    holder.wait()
    StoreDirectory.open(root, storage).close()


def test_closing_releases_the_lock_and_keeps_the_file(root: Path, storage: PosixStorage) -> None:
    first = StoreDirectory.open(root, storage)
    with pytest.raises(StoreInUse, match=f"process {os.getpid()}"):
        StoreDirectory.open(root, storage)
    inode = (root / "LOCK").stat().st_ino
    first.close()
    first.close()
    StoreDirectory.open(root, storage).close()
    assert (root / "LOCK").stat().st_ino == inode


def test_closing_releases_the_lock_although_a_forked_child_still_has_the_file(
    root: Path, storage: PosixStorage
) -> None:
    directory = StoreDirectory.open(root, storage)
    wait, go_on = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go_on)
        os.read(wait, 1)
        os._exit(0)
    try:
        directory.close()
        StoreDirectory.open(root, storage).close()
    finally:
        os.close(go_on)
        os.close(wait)
        os.waitpid(child, 0)
