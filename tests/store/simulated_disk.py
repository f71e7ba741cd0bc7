"""A disk in memory that loses power, fails and forgets, reproducibly from a seed.

Every mutating operation is a crash point: `before_operation` is called in front of it, and
`crash` and `kill` return, at any time, the disk that a restart would find. `power_loss_model` says
what may be lost.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvws.store.storage import SECTOR_BYTES
from tests.store.power_loss_model import ATOMIC_BYTES, Directory, Inode, Node

Operation = Literal[
    "write", "sync", "truncate", "create", "allocate", "rename", "unlink", "make_directory",
    "remove_directory", "sync_directory",
]  # fmt: skip


@dataclass
class Fault:
    """The next `count` mutating operations (or reads) from number `first` on fail, of those on
    files whose name begins with `only`.

    A failed write leaves any of its sectors old or new; a `short` one a prefix.
    """

    first: int
    error: int = errno.EIO
    count: int = 1
    short: bool = False
    only: str = ""

    def hits(self, operation: int, path: Path) -> bool:
        """Mutates `count`."""
        if operation < self.first or not self.count or not path.name.startswith(self.only):
            return False
        self.count -= 1
        return True


class SimulatedFile:
    """An open file of a `SimulatedDisk`."""

    def __init__(self, disk: SimulatedDisk, path: Path, inode: Inode, aligned: bool) -> None:
        self._disk = disk
        self._path = path
        self._inode = inode
        self._aligned = aligned
        self._closed = False
        disk.open_files += 1

    def read(self, buffers: Sequence[memoryview], offset: int) -> None:
        self._require_access(buffers, offset)
        self._disk.count_read(self._path)
        for buffer in buffers:
            piece = self._inode.view[offset : offset + buffer.nbytes]
            if len(piece) < buffer.nbytes:
                raise EOFError(f"{self._path} ends at {len(self._inode.view)}")
            buffer[:] = piece
            offset += buffer.nbytes

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        self._require_access(buffers, offset)
        data = b"".join(buffers)
        fault = self._disk.start("write", self._path)
        if fault is None:
            self._inode.write(offset, data)
            return
        if fault.short:
            self._inode.write(offset, data[: self._disk.chance.randrange(len(data) + 1)])
        else:
            for start in range(0, len(data), ATOMIC_BYTES):
                if self._disk.chance.random() < 0.5:
                    self._inode.write(offset + start, data[start : start + ATOMIC_BYTES])
        raise _error(fault, self._path)

    def sync(self) -> None:
        self._require_open()
        fault = self._disk.start("sync", self._path)
        if fault is not None:
            self._inode.fail_sync(self._disk.chance)
            raise _error(fault, self._path)
        if not self._disk.forgets_sync(self._path):
            self._inode.sync()

    def size(self) -> int:
        self._require_open()
        return len(self._inode.view)

    def truncate(self, size_bytes: int) -> None:
        self._require_open()
        self._disk.start_or_fail("truncate", self._path)
        self._inode.resize(size_bytes)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._disk.open_files -= 1

    def _require_open(self) -> None:
        assert not self._closed, f"{self._path} was closed"

    def _require_access(self, buffers: Sequence[memoryview], offset: int) -> None:
        self._require_open()
        assert offset >= 0, f"offset {offset}"
        if self._aligned:
            lengths = [buffer.nbytes for buffer in buffers]
            assert not any(n % SECTOR_BYTES for n in (offset, *lengths)), (offset, lengths)


class SimulatedDisk:
    """A `Storage` in memory.

    Attributes:
        before_operation: called with each mutating operation and its path before it happens.
        fault, read_fault: which mutating operations and which reads fail.
        operations, reads: how many of each were asked for.
        open_files: handles that were not closed.
        ignored_syncs: a planted fault: file names (their beginnings) and "directory" whose syncs
            return without having done anything.
    """

    def __init__(self, seed: int | float | str = 0, root: Directory | None = None) -> None:
        self.chance = random.Random(seed)
        self.before_operation: Callable[[Operation, Path], None] | None = None
        self.fault: Fault | None = None
        self.read_fault: Fault | None = None
        self.operations = 0
        self.reads = 0
        self.open_files = 0
        self.ignored_syncs: tuple[str, ...] = ()
        self._root = root or Directory()

    @property
    def description(self) -> str:
        return "simulated"

    def crash(self, chance: random.Random) -> SimulatedDisk:
        """The disk as it is found after losing power now; this one is left as it is."""
        return self._successor(self._root.after_power_loss(chance))

    def kill(self) -> SimulatedDisk:
        """The disk as a process finds it whose predecessor was killed now: nothing is lost, and
        nothing became durable."""
        return self._successor(self._root.copy())

    def _successor(self, root: Directory) -> SimulatedDisk:
        found = SimulatedDisk(self.chance.random(), root)
        found.ignored_syncs = self.ignored_syncs
        return found

    def content(self, path: Path) -> bytearray:
        """The bytes of a file, to look at or to damage behind the program's back."""
        return self._file(path).view

    def open_segment(self, path: Path, *, create_bytes: int | None = None) -> SimulatedFile:
        if create_bytes is None:
            return SimulatedFile(self, path, self._file(path), aligned=True)
        assert create_bytes % SECTOR_BYTES == 0, create_bytes
        inode = self._create(path)
        fault = self.start("allocate", path)
        if fault is not None:
            self._parent(path).change(path.name, None, inode)
            raise _error(fault, path)
        inode.resize(create_bytes)
        return SimulatedFile(self, path, inode, aligned=True)

    def open_log(self, path: Path, *, create: bool = False) -> SimulatedFile:
        if create and not self.exists(path):
            return SimulatedFile(self, path, self._create(path), aligned=False)
        return SimulatedFile(self, path, self._file(path), aligned=False)

    def _create(self, path: Path) -> Inode:
        parent = self._parent(path)
        if path.name in parent.view:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        self.start_or_fail("create", path)
        inode = Inode()
        parent.change(None, path.name, inode)
        return inode

    def list_directory(self, path: Path) -> list[str]:
        self.count_read(path)
        return sorted(self._directory(path).view)

    def make_directory(self, path: Path) -> None:
        parent = self._parent(path)
        if path.name in parent.view:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        self.start_or_fail("make_directory", path)
        parent.change(None, path.name, Directory())

    def rename(self, old: Path, new: Path) -> None:
        assert old.parent == new.parent, "the store renames within a directory"
        node = self._file(old)
        self.start_or_fail("rename", old)
        self._parent(old).change(old.name, new.name, node)

    def unlink(self, path: Path) -> None:
        node = self._file(path)
        self.start_or_fail("unlink", path)
        self._parent(path).change(path.name, None, node)

    def remove_directory(self, path: Path) -> None:
        node = self._directory(path)
        if node.view:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
        self.start_or_fail("remove_directory", path)
        self._parent(path).change(path.name, None, node)

    def sync_directory(self, path: Path) -> None:
        directory = self._directory(path)
        self.start_or_fail("sync_directory", path)
        if "directory" not in self.ignored_syncs:
            directory.sync()

    def exists(self, path: Path) -> bool:
        try:
            self._node(path)
        except FileNotFoundError:
            return False
        return True

    def allocated_bytes(self, path: Path) -> int:
        return -(-len(self._file(path).view) // SECTOR_BYTES) * SECTOR_BYTES

    def start(self, operation: Operation, path: Path) -> Fault | None:
        """Count a mutating operation; the fault that it meets."""
        if self.before_operation is not None:
            self.before_operation(operation, path)
        number = self.operations
        self.operations += 1
        return self.fault if self.fault is not None and self.fault.hits(number, path) else None

    def start_or_fail(self, operation: Operation, path: Path) -> None:
        fault = self.start(operation, path)
        if fault is not None:
            raise _error(fault, path)

    def count_read(self, path: Path) -> None:
        number = self.reads
        self.reads += 1
        if self.read_fault is not None and self.read_fault.hits(number, path):
            raise _error(self.read_fault, path)

    def forgets_sync(self, path: Path) -> bool:
        return path.name.startswith(self.ignored_syncs) if self.ignored_syncs else False

    def _node(self, path: Path) -> Node:
        node: Node = self._root
        for name in path.parts[1:]:
            if not isinstance(node, Directory) or name not in node.view:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            node = node.view[name]
        return node

    def _directory(self, path: Path) -> Directory:
        node = self._node(path)
        if not isinstance(node, Directory):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        return node

    def _parent(self, path: Path) -> Directory:
        return self._directory(path.parent)

    def _file(self, path: Path) -> Inode:
        node = self._node(path)
        if not isinstance(node, Inode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        return node


def _error(fault: Fault, path: Path) -> OSError:
    return OSError(fault.error, os.strerror(fault.error), str(path))
