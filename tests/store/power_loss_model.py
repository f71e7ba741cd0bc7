"""Files and directories that are partly on the platters and partly only in memory.

What survives a power loss:
- synced data; of unsynced data a random subset of 512-byte sectors, each as any version that it
  had since the last sync;
- of an unsynced size any size that the file had or passed; what was never written in the grown
  part reads as zeros or garbage;
- directory changes before the last `sync_directory`; of later ones a random subset, regardless of
  the files' data. A rename is atomic; syncing a file does not make its name durable.

After a sync that failed, the written sectors stay old-or-new, even over later syncs that succeed,
until they are written and synced again; the running system may see them revert.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

ATOMIC_BYTES = 512
"""What a disk writes whole or not at all."""


@dataclass(eq=False)
class Inode:
    """A file: what programs see, what is on the platters, and what is between the two."""

    view: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    durable_bytes: int = 0
    dirty: dict[int, list[bytes]] = field(default_factory=dict)
    doubtful: dict[int, list[bytes]] = field(default_factory=dict)
    dirty_sizes: list[int] = field(default_factory=list)
    doubtful_sizes: list[int] = field(default_factory=list)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        end = offset + len(data)
        if end > len(self.view):
            self.view.extend(bytes(end - len(self.view)))
            self.dirty_sizes.append(end)
        self.view[offset:end] = data
        if data:
            self._mark(range(offset // ATOMIC_BYTES, (end - 1) // ATOMIC_BYTES + 1))

    def resize(self, size_bytes: int) -> None:
        before = len(self.view)
        if size_bytes == before:
            return
        del self.view[size_bytes:]
        self.view.extend(bytes(size_bytes - len(self.view)))
        self.dirty_sizes.append(size_bytes)
        if size_bytes < before:
            self._mark(range(size_bytes // ATOMIC_BYTES, -(-before // ATOMIC_BYTES)))

    def _mark(self, sectors: range) -> None:
        for sector in sectors:
            self.dirty.setdefault(sector, []).append(self._seen(sector))

    def _seen(self, sector: int) -> bytes:
        piece = bytes(self.view[sector * ATOMIC_BYTES : (sector + 1) * ATOMIC_BYTES])
        return piece.ljust(ATOMIC_BYTES, b"\0")

    def _kept(self, sector: int) -> bytes:
        piece = bytes(self.durable[sector * ATOMIC_BYTES : (sector + 1) * ATOMIC_BYTES])
        return piece.ljust(ATOMIC_BYTES, b"\0")

    def sync(self) -> None:
        size_bytes = len(self.view)
        if len(self.durable) < size_bytes:
            self.durable.extend(bytes(size_bytes - len(self.durable)))
        for sector in self.dirty:
            start = sector * ATOMIC_BYTES
            if start < size_bytes:
                piece = self.view[start : start + ATOMIC_BYTES]
                self.durable[start : start + len(piece)] = piece
            self.doubtful.pop(sector, None)
        if self.dirty_sizes:
            self.durable_bytes, self.doubtful_sizes = size_bytes, []
            del self.durable[size_bytes:]
            self.doubtful = {
                sector: versions
                for sector, versions in self.doubtful.items()
                if sector * ATOMIC_BYTES < size_bytes
            }
        elif self.dirty:
            reached = min(size_bytes, (max(self.dirty) + 1) * ATOMIC_BYTES)
            self.durable_bytes = max(self.durable_bytes, reached)
            self.doubtful_sizes = [s for s in self.doubtful_sizes if s >= self.durable_bytes]
        self.dirty, self.dirty_sizes = {}, []

    def fail_sync(self, chance: random.Random) -> None:
        for sector, versions in self.dirty.items():
            self.doubtful.setdefault(sector, []).extend(versions)
            start = sector * ATOMIC_BYTES
            room = min(ATOMIC_BYTES, len(self.view) - start)
            if room > 0 and chance.random() < 0.3:
                self.view[start : start + room] = self._kept(sector)[:room]
        self.doubtful_sizes += self.dirty_sizes
        self.dirty, self.dirty_sizes = {}, []

    def after_power_loss(self, chance: random.Random) -> Inode:
        sizes = [self.durable_bytes, *self.doubtful_sizes, *self.dirty_sizes]
        if len(sizes) == 1:
            size_bytes = sizes[0]
        elif chance.random() < 0.75:
            size_bytes = chance.choice(sizes)
        else:
            size_bytes = chance.randint(min(sizes), max(sizes))
        found = self.durable[: min(size_bytes, self.durable_bytes)]
        grown = size_bytes - len(found)
        if grown:
            found += chance.randbytes(grown) if chance.random() < 0.3 else bytes(grown)
        loss = chance.choice((0.0, 0.1, 0.5, 0.5, 0.9, 1.0))
        age = chance.choice(("newest", "newest", "any", "any", "oldest"))
        for sector in self.dirty.keys() | self.doubtful.keys():
            start = sector * ATOMIC_BYTES
            room = min(ATOMIC_BYTES, size_bytes - start)
            if room > 0 and chance.random() >= loss:
                versions = self.doubtful.get(sector, []) + self.dirty.get(sector, [])
                kept = {"newest": versions[-1], "oldest": versions[0]}.get(age)
                kept = kept or chance.choice(versions)
                found[start : start + room] = kept[:room]
        return Inode(found, bytearray(found), size_bytes)

    def copy(self) -> Inode:
        return Inode(
            bytearray(self.view),
            bytearray(self.durable),
            self.durable_bytes,
            {sector: list(versions) for sector, versions in self.dirty.items()},
            {sector: list(versions) for sector, versions in self.doubtful.items()},
            list(self.dirty_sizes),
            list(self.doubtful_sizes),
        )


@dataclass(eq=False)
class Directory:
    """Names: as programs see them, as they are durable, and the changes between the two.

    A change (old, new, node) takes `node` from the name `old` (if any) to `new` (if any).
    """

    view: dict[str, Node] = field(default_factory=dict)
    durable: dict[str, Node] = field(default_factory=dict)
    changes: list[tuple[str | None, str | None, Node]] = field(default_factory=list)

    def change(self, old: str | None, new: str | None, node: Node) -> None:
        self.changes.append((old, new, node))
        _apply(self.view, old, new, node)

    def sync(self) -> None:
        self.durable, self.changes = dict(self.view), []

    def after_power_loss(self, chance: random.Random) -> Directory:
        names = self.durable
        if self.changes:
            names = dict(names)
            loss = chance.choice((0.0, 0.2, 0.5, 0.8, 1.0))
            for old, new, node in self.changes:
                if chance.random() >= loss:
                    _apply(names, old, new, node)
        found = {name: node.after_power_loss(chance) for name, node in names.items()}
        return Directory(found, dict(found))

    def copy(self) -> Directory:
        copies: dict[int, Node] = {}

        def copied(node: Node) -> Node:
            if id(node) not in copies:
                copies[id(node)] = node.copy()
            return copies[id(node)]

        return Directory(
            {name: copied(node) for name, node in self.view.items()},
            {name: copied(node) for name, node in self.durable.items()},
            [(old, new, copied(node)) for old, new, node in self.changes],
        )


Node = Inode | Directory


def _apply(names: dict[str, Node], old: str | None, new: str | None, node: Node) -> None:
    if old is not None and names.get(old) is node:
        del names[old]
    if new is not None:
        names[new] = node
