"""How much of the disk the blocks of one rank may take, over all workspaces of a directory."""

from __future__ import annotations

import threading
from pathlib import Path

from kvws.errors import DiskTierFull


class DiskBudget:
    """Bytes that the stores of a rank allocate together. Thread-safe.

    Stores that are open take and give back themselves; those of workspaces that nobody has
    attached are weighed once.
    """

    def __init__(self, capacity_bytes: int, root: Path, rank: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._taken_bytes = 0
        self._closed_stores = {
            path: allocated_bytes(path) for path in root.glob(f"*/rank-{rank}")
        }

    @property
    def used_bytes(self) -> int:
        return self._taken_bytes + sum(self._closed_stores.values())

    def take(self, size_bytes: int) -> None:
        """Raises DiskTierFull when they are not left."""
        with self._lock:
            if self.used_bytes + size_bytes > self.capacity_bytes:
                raise DiskTierFull(
                    f"the disk tier holds {self.used_bytes} of {self.capacity_bytes} bytes, "
                    f"{size_bytes} more are needed",
                    hint="raise --disk-gb, or remove workspaces with kvws sessions rm",
                )
            self._taken_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        with self._lock:
            self._taken_bytes -= size_bytes

    def opening(self, store: Path) -> None:
        """A store is about to be opened: from now on it takes what it has allocated itself."""
        with self._lock:
            self._closed_stores.pop(store, None)

    def closed(self, store: Path) -> None:
        """A store was closed; what it had taken is given back, its files remain."""
        with self._lock:
            self._closed_stores[store] = allocated_bytes(store)


def allocated_bytes(folder: Path) -> int:
    """Disk space of the files in a folder; 0 when there is none."""
    try:
        return sum(512 * path.stat().st_blocks for path in folder.iterdir())
    except OSError:
        return 0
