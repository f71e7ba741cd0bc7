"""The engine's processes: those that appeared while it started, and no others."""

from __future__ import annotations

from multiprocessing import resource_tracker

import psutil

_STOP_SECONDS = 20.0


class EngineProcesses:
    """Children of this process that an engine's start brought, stopped by id."""

    def __init__(self) -> None:
        """To be made right before the engine is started."""
        self._before = _children()

    def pids(self) -> list[int]:
        """The engine's own children, without Python's resource tracker, which all share."""
        # The tracker has no public name; stopping it would break this process's semaphores.
        tracker = getattr(resource_tracker, "_resource_tracker", None)
        shared = {getattr(tracker, "_pid", None)}
        return sorted(_children() - self._before - shared)

    def stop(self) -> None:
        """Kill the engine's processes with their children, and wait until they are gone."""
        doomed: list[psutil.Process] = []
        for pid in self.pids():
            try:
                process = psutil.Process(pid)
                doomed += [*process.children(recursive=True), process]
            except psutil.NoSuchProcess:
                continue
        for process in doomed:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(doomed, timeout=_STOP_SECONDS)


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}
