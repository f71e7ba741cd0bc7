"""Real files: payloads past the page cache where the file system allows it."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from kvws.store.storage import SECTOR_BYTES, File

# The system calls below are those of Python, which start again after a signal (PEP 475).
_OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
_MAX_BUFFERS = os.sysconf("SC_IOV_MAX")


class PosixFile:
    """An open file; see `File`. Its offsets, lengths and buffers are aligned if `aligned`."""

    def __init__(self, descriptor: int, *, aligned: bool) -> None:
        self._descriptor = descriptor
        self._aligned = aligned

    def read(self, buffers: Sequence[memoryview], offset: int) -> None:
        self._transfer(os.preadv, buffers, offset)

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        self._transfer(os.pwritev, buffers, offset)

    def sync(self) -> None:
        os.fdatasync(self._descriptor)

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def truncate(self, size_bytes: int) -> None:
        os.ftruncate(self._descriptor, size_bytes)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _transfer(
        self,
        call: Callable[[int, Sequence[memoryview], int], int],
        buffers: Sequence[memoryview],
        offset: int,
    ) -> None:
        """Repeat a vectored call until the buffers are through."""
        if self._aligned:
            assert_aligned(buffers, offset)
        for first in range(0, len(buffers), _MAX_BUFFERS):
            pending = [buffer for buffer in buffers[first : first + _MAX_BUFFERS] if buffer.nbytes]
            while pending:
                moved_bytes = call(self._descriptor, pending, offset)
                if self._aligned:
                    moved_bytes -= moved_bytes % SECTOR_BYTES
                if moved_bytes == 0:
                    raise self._stalled(call is os.preadv, pending, offset)
                pending = _after(pending, moved_bytes)
                offset += moved_bytes

    def _stalled(
        self, reading: bool, pending: Sequence[memoryview], offset: int
    ) -> EOFError | OSError:
        """The error for a call that moved nothing."""
        end = offset + sum(buffer.nbytes for buffer in pending)
        if reading and end > self.size():
            return EOFError(f"{end} bytes were expected, the file has {self.size()}")
        return OSError(errno.EIO, f"no byte was transferred at offset {offset}")


class PosixStorage:
    """A directory of a real file system; see `Storage`."""

    def __init__(self, directory: Path) -> None:
        """Find out whether direct I/O works.

        Args:
            directory: where the files will lie; it, or the nearest of its parents that exists,
                is asked with a nameless file.
        """
        refusal = _direct_io_refusal(directory)
        self._direct_flag = os.O_DIRECT if refusal is None else 0
        mode = "O_DIRECT" if refusal is None else f"buffered ({refusal})"
        self._description = f"posix, {mode}"

    @property
    def description(self) -> str:
        return self._description

    def open_segment(self, path: Path, *, create_bytes: int | None = None) -> File:
        if create_bytes is not None:
            _create_allocated(path, create_bytes)
        return self._opened_segment(os.open(path, _OPEN_FLAGS | self._direct_flag))

    def _opened_segment(self, descriptor: int) -> File:
        return PosixFile(descriptor, aligned=True)

    def open_log(self, path: Path, *, create: bool = False) -> File:
        flags = _OPEN_FLAGS | (os.O_CREAT if create else 0)
        return PosixFile(os.open(path, flags, 0o600), aligned=False)

    def list_directory(self, path: Path) -> list[str]:
        return sorted(os.listdir(path))

    def make_directory(self, path: Path) -> None:
        path.mkdir(mode=0o700)

    def rename(self, old: Path, new: Path) -> None:
        old.replace(new)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def remove_directory(self, path: Path) -> None:
        path.rmdir()

    def sync_directory(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def exists(self, path: Path) -> bool:
        return os.path.lexists(path)

    def allocated_bytes(self, path: Path) -> int:
        return path.lstat().st_blocks * 512  # the unit of st_blocks, whatever the file system


def assert_aligned(buffers: Sequence[memoryview], offset: int) -> None:
    """Offsets, lengths and addresses of segment files are whole sectors, on every file system."""
    assert offset % SECTOR_BYTES == 0, f"offset {offset} is not aligned"
    for buffer in buffers:
        assert buffer.nbytes % SECTOR_BYTES == 0, f"a buffer of {buffer.nbytes} bytes"
        address = np.frombuffer(buffer, dtype=np.uint8).ctypes.data if buffer.nbytes else 0
        assert address % SECTOR_BYTES == 0, f"a buffer at {address:#x} is not aligned"


def _after(buffers: Sequence[memoryview], done_bytes: int) -> list[memoryview]:
    """What remains of the buffers after their first bytes."""
    for index, buffer in enumerate(buffers):
        if done_bytes < buffer.nbytes:
            return [buffer.cast("B")[done_bytes:], *buffers[index + 1 :]]
        done_bytes -= buffer.nbytes
    return []


def _create_allocated(path: Path, size_bytes: int) -> None:
    """Create a file with allocated bytes, or none: a full disk leaves a partly grown file."""
    descriptor = os.open(path, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            path.unlink()
        raise
    finally:
        os.close(descriptor)


def _direct_io_refusal(directory: Path) -> str | None:
    """Why direct I/O does not work in a directory; None after a real write and read."""
    try:
        file = PosixFile(open_nameless(directory, os.O_DIRECT), aligned=True)
    except OSError as error:
        return f"no file can be opened for it: {error.strerror}"
    with contextlib.closing(file):
        try:
            prove(file)
        except OSError as error:
            return f"a write and read failed: {error.strerror}"
    return None


def prove(file: File) -> None:
    """Write a sector and read it back.

    Raises:
        OSError: that failed, or other bytes came back.
    """
    memory = memoryview(mmap.mmap(-1, 2 * SECTOR_BYTES))
    written, back = memory[:SECTOR_BYTES], memory[SECTOR_BYTES:]
    written[:] = secrets.token_bytes(SECTOR_BYTES)
    file.write([written], 0)
    file.read([back], 0)
    if written != back:
        raise OSError(errno.EIO, "other bytes came back")


def open_nameless(directory: Path, extra_flags: int = 0) -> int:
    """A descriptor of a file that is gone when it is closed, or when the process dies.

    Args:
        directory: where it is created, or in the nearest of its parents that exists.
    """
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    flags = os.O_RDWR | os.O_CLOEXEC | extra_flags
    try:
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
    path = directory / f".probe-{secrets.token_hex(8)}"
    descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    path.unlink()
    return descriptor
