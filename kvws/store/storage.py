"""What the store asks of a disk.

Everything durable goes through `Storage`, so that the tests can put a simulated disk that loses
power, fails or fills up in its place. Nothing here is asynchronous: callers bring their threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

Backend = Literal["auto", "posix", "kvikio"]
"""What moves payloads: KvikIO where CUDA is, or the system calls of POSIX."""

SECTOR_BYTES = 4096
"""Alignment of offsets, lengths and buffers of segment files (O_DIRECT, GPUDirect)."""


class File(Protocol):
    """An open file. Several threads may read and write disjoint ranges at once."""

    def read(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill the buffers from consecutive bytes at `offset`.

        Raises:
            EOFError: the file ends before.
            OSError: the disk's error.
        """
        ...

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Write the buffers one after the other at `offset`, all of them or OSError.

        What an error leaves on the disk is undefined within the range.
        """
        ...

    def sync(self) -> None:
        """Make data and size durable (fdatasync)."""
        ...

    def size(self) -> int: ...

    def truncate(self, size_bytes: int) -> None: ...

    def close(self) -> None: ...


class Storage(Protocol):
    """A file system. Paths are absolute; a creation or rename is durable after
    `sync_directory` of its parent, not before."""

    @property
    def description(self) -> str:
        """How payloads are moved, for the log: "posix, O_DIRECT", "kvikio, GPUDirect", …"""
        ...

    def open_segment(self, path: Path, *, create_bytes: int | None = None) -> File:
        """Open a payload file, whose accesses are all aligned to SECTOR_BYTES.

        Args:
            create_bytes: create it with so many allocated bytes; it must not exist. A failure
                leaves no file behind.

        Raises:
            OSError: FileNotFoundError, FileExistsError, ENOSPC, …
        """
        ...

    def open_log(self, path: Path, *, create: bool = False) -> File:
        """Open a small file for unaligned access through the page cache; create it empty when
        `create` and missing."""
        ...

    def list_directory(self, path: Path) -> list[str]:
        """Names in a directory, sorted."""
        ...

    def make_directory(self, path: Path) -> None:
        """Create one directory, mode 0700. FileExistsError if there is one."""
        ...

    def rename(self, old: Path, new: Path) -> None:
        """Replace `new` atomically."""
        ...

    def unlink(self, path: Path) -> None: ...

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory."""
        ...

    def sync_directory(self, path: Path) -> None: ...

    def exists(self, path: Path) -> bool: ...

    def allocated_bytes(self, path: Path) -> int:
        """Disk space a file takes, which holes punched or never written reduce."""
        ...
