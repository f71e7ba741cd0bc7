"""The retrieval indexes of a rank, by workspace."""

from __future__ import annotations

import threading

from kvws.recall.device_rows import DeviceRows
from kvws.recall.index import BlockIndex
from kvws.recall.signals.enabled import EnabledSignals


class WorkspaceIndexes:
    """Makes a workspace's index when it is first needed. Any thread may call."""

    def __init__(self, signals: EnabledSignals, near: DeviceRows | None) -> None:
        """`near`: where rows are scored; None for host memory."""
        self._signals = signals
        self._near = near
        self._lock = threading.Lock()
        self._indexes: dict[str, BlockIndex] = {}

    @property
    def nbytes(self) -> int:
        """Of host memory."""
        return sum(index.nbytes for index in list(self._indexes.values()))

    def of(self, workspace: str) -> BlockIndex:
        """To be written to."""
        with self._lock:
            if workspace not in self._indexes:
                self._indexes[workspace] = BlockIndex(self._signals, self._near)
            return self._indexes[workspace]

    def find(self, workspace: str) -> BlockIndex | None:
        return self._indexes.get(workspace)

    def asked(self, workspace: str) -> BlockIndex:
        """To be asked for scores: an empty one where there is none."""
        return self.find(workspace) or BlockIndex(self._signals)

    def drop(self, workspace: str) -> None:
        """Forget one, if there is one."""
        with self._lock:
            index = self._indexes.pop(workspace, None)
        if index is not None:
            index.release()
