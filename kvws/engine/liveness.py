"""Knowing that an engine process died while somebody waits for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterable
from pathlib import Path
from typing import TypeVar

import psutil

from kvws.errors import EngineDied

T = TypeVar("T")


class Liveness:
    """Turns the death of an engine process into `EngineDied` for everyone who waits."""

    def __init__(self, pids: Iterable[int], log: Path, *, poll_seconds: float = 0.25) -> None:
        self._pids = tuple(pids)
        self._log = log
        self._poll_seconds = poll_seconds

    def require_alive(self) -> None:
        """Raises EngineDied when a process is gone."""
        for pid in self._pids:
            if not _is_running(pid):
                raise EngineDied(
                    f"engine process {pid} is gone", hint=f"its last words are in {self._log}"
                )

    async def guard(self, waiting: Awaitable[T]) -> T:
        """Await something that only a living engine can finish."""
        task = asyncio.ensure_future(waiting)
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=self._poll_seconds)
                if done:
                    return task.result()
                self.require_alive()
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task


def _is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
