"""Payloads through KvikIO, which brings GPUDirect Storage to machines with CUDA."""

from __future__ import annotations

import contextlib
import errno
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvws.store.posix import PosixFile, PosixStorage, assert_aligned, open_nameless, prove
from kvws.store.storage import File

POOL_THREADS = 4
"""Requests that KvikIO has under way at once; its own default is one."""


class KvikioFile(PosixFile):
    """A segment file whose data goes through a `kvikio.CuFile`; see `File`.

    KvikIO has no sync, so the descriptor stays open beside it.
    """

    def __init__(self, descriptor: int, kvikio: Any) -> None:
        """Take a descriptor over; it is closed on failure too.

        Raises:
            OSError: KvikIO's error.
        """
        super().__init__(descriptor, aligned=True)
        try:
            # By descriptor, so that both are the same file whatever the path leads to.
            self._cufile = kvikio.CuFile(f"/proc/self/fd/{descriptor}", "r+")
        except RuntimeError as error:
            super().close()
            raise OSError(errno.EIO, str(error)) from error

    def read(self, buffers: Sequence[memoryview], offset: int) -> None:
        end = offset + sum(buffer.nbytes for buffer in buffers)
        if end > self.size():
            raise EOFError(f"{end} bytes were expected, the file has {self.size()}")
        self._move(self._cufile.pread, buffers, offset)

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        self._move(self._cufile.pwrite, buffers, offset)

    def close(self) -> None:
        self._cufile.close()
        super().close()

    def _move(
        self, submit: Callable[..., Any], buffers: Sequence[memoryview], offset: int
    ) -> None:
        """One request a buffer, all under way at once.

        Every request is waited for, whatever becomes of the others: the pool's threads use the
        buffers until then.
        """
        assert_aligned(buffers, offset)
        pending: list[tuple[Any, int]] = []
        problem: str | None = None
        try:
            for buffer in buffers:
                array = np.frombuffer(buffer, dtype=np.uint8)
                pending.append((submit(array, file_offset=offset), buffer.nbytes))
                offset += buffer.nbytes
        except RuntimeError as error:
            problem = str(error)
        for future, expected_bytes in pending:
            try:
                moved_bytes = future.get()
            except RuntimeError as error:
                problem = problem or str(error)
                continue
            if moved_bytes != expected_bytes:
                problem = problem or f"{moved_bytes} of {expected_bytes} bytes were transferred"
        if problem is not None:
            raise OSError(errno.EIO, problem)  # KvikIO's errors carry no errno


class KvikioStorage(PosixStorage):
    """A directory of a real file system, its segments read and written by KvikIO."""

    def __init__(self, directory: Path) -> None:
        """Load KvikIO and, in this process, give it direct I/O and more than one thread.

        Args:
            directory: as for `PosixStorage`.

        Raises:
            Exception: whatever loading KvikIO and its libraries raises.
        """
        super().__init__(directory)
        self._kvikio: Any = importlib.import_module("kvikio")
        defaults: Any = importlib.import_module("kvikio.defaults")
        driver: Any = importlib.import_module("kvikio.cufile_driver")
        threads = max(POOL_THREADS, defaults.get("num_threads"))
        defaults.set({"num_threads": threads, "auto_direct_io_read": True})
        gpu_direct = not defaults.is_compat_mode_preferred() and driver.get("is_gds_available")
        self._description = f"kvikio, {'GPUDirect' if gpu_direct else 'compatibility mode'}"

    def _opened_segment(self, descriptor: int) -> File:
        return KvikioFile(descriptor, self._kvikio)

    def probe(self, directory: Path) -> None:
        """Write and read a nameless file. Raises OSError."""
        with contextlib.closing(KvikioFile(open_nameless(directory), self._kvikio)) as file:
            prove(file)


def unusable_reason(directory: Path) -> str | None:
    """Why KvikIO cannot be used in a directory; None after a real write and read of host memory.

    Without a CUDA driver it loads and opens files, and only then fails.
    """
    try:
        KvikioStorage(directory).probe(directory)
    except Exception as error:  # its loaders raise what they like
        return f"{type(error).__name__}: {error}"
    return None
