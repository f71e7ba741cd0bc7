"""One process owns a store directory, for as long as it lives."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from pathlib import Path

from kvws.errors import ConfigError, StoreInUse, UnsafeStore

LOCK_NAME = "LOCK"
_MARK = b"kvws "
_MAX_TEXT_BYTES = 512


class DirectoryLock:
    """An exclusive lock on `<directory>/LOCK`, which names its holder as text.

    The kernel holds the lock and lets it go when the process dies, however it dies; the text is
    for people only. The file is never deleted: two processes could then each lock their own.
    """

    def __init__(self, directory: Path) -> None:
        """Take the lock.

        Raises:
            StoreInUse: another process, or another owner in this one, holds it.
            UnsafeStore: LOCK is not a plain file.
            ConfigError: the file cannot be made, or the file system has no locks.
        """
        path = directory / LOCK_NAME
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise _not_plain(path) from error
            raise ConfigError(
                f"{path} cannot be opened: {error.strerror}", hint="name another --disk-dir"
            ) from error
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _not_plain(path)
            _lock(descriptor, directory)
            text = _MARK + f"pid {os.getpid()} host {socket.gethostname()}\n".encode()
            # The text informs; a disk too full for it must not keep the owner out. Its mark is
            # never cut off, so that a power loss does not make the directory a stranger's.
            with contextlib.suppress(OSError):
                os.pwrite(descriptor, text, 0)
                os.ftruncate(descriptor, len(text))
                os.fsync(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def close(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._descriptor >= 0:
            # Explicitly, because a forked child shares the open file and would keep it locked.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = -1


def is_ours(directory: Path) -> bool:
    """Whether the directory has a LOCK that kvws wrote (other programs use that name too)."""
    try:
        descriptor = os.open(directory / LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return os.read(descriptor, len(_MARK)) == _MARK
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _lock(descriptor: int, directory: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StoreInUse(
            f"{directory} is in use by {_holder(descriptor)}",
            hint="stop it, or use another --disk-dir",
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be locked: {error.strerror}",
            hint="name a --disk-dir on a local disk",
        ) from error


def _holder(descriptor: int) -> str:
    words = os.pread(descriptor, _MAX_TEXT_BYTES, 0).decode("utf-8", "replace").split()
    match words:
        case ["kvws", "pid", pid, "host", host]:
            return f"process {pid} on {host}"
        case _:
            return "another process"


def _not_plain(path: Path) -> UnsafeStore:
    return UnsafeStore(f"{path} is not a plain file", hint="move it away")
