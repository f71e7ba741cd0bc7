"""Locks by name, for names that clients choose: there is no end to them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class NamedLocks:
    """A lock for every name, for as long as somebody holds it or waits for it."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._wanted: Counter[str] = Counter()

    def __len__(self) -> int:
        """Names that are held or waited for."""
        return len(self._locks)

    @asynccontextmanager
    async def held(self, name: str) -> AsyncGenerator[None]:
        """Wait for a name's lock and hold it."""
        lock = self._locks.setdefault(name, asyncio.Lock())
        self._wanted[name] += 1
        try:
            async with lock:
                yield
        finally:
            self._wanted[name] -= 1
            if not self._wanted[name]:
                del self._wanted[name], self._locks[name]
