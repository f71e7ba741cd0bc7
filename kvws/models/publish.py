"""Folders that appear complete or not at all, also when several processes make the same one."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path


def publish_once(folder: Path, fill: Callable[[Path], None]) -> None:
    """Make `folder` with the contents that `fill` writes, unless it exists already.

    The contents are written into a hidden sibling, synced, and renamed; a lock file beside it
    makes other processes wait. Where file locks don't work the first rename wins and the
    others throw their work away. What a killed process left behind is removed.

    Raises:
        OSError: as the disk does. `folder` is then as before, whatever `fill` raised.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f".{folder.name}.lock")) as exclusive:
        if folder.exists():
            return
        if exclusive:
            _remove_leftovers(folder)
        temporary = Path(tempfile.mkdtemp(prefix=_temporary_prefix(folder), dir=folder.parent))
        try:
            fill(temporary)
            temporary.chmod(0o755)
            _sync_contents(temporary)
            _rename_or_lose(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        _sync(folder.parent)


def _temporary_prefix(folder: Path) -> str:
    return f".{folder.name}.new-"


@contextmanager
def _locked(path: Path) -> Generator[bool]:
    """Hold `path` as a lock; yields whether the file system supports that."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _remove_leftovers(folder: Path) -> None:
    for leftover in folder.parent.glob(f"{_temporary_prefix(folder)}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _rename_or_lose(temporary: Path, folder: Path) -> None:
    try:
        temporary.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def _sync_contents(folder: Path) -> None:
    for entry in folder.iterdir():
        _sync(entry)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
