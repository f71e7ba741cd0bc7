"""How many requests are worked on at a time, and how many wait for that."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Generator, Hashable
from contextlib import asynccontextmanager, contextmanager

from kvws.errors import Overloaded, TooManyRequests

_RETRY_AFTER_S = 2


class Admission:
    """Slots for requests, given in the order in which they were asked for.

    A slot is held by an `async with` block, so it comes back however the block is left.
    """

    def __init__(self, answering_max: int, waiting_max: int, per_session_max: int) -> None:
        self._free = asyncio.Semaphore(answering_max)
        self._waiting_max = waiting_max
        self._per_session_max = per_session_max
        self._sessions: Counter[Hashable] = Counter()
        self.answering = 0
        self.waiting = 0

    @asynccontextmanager
    async def slot(self) -> AsyncGenerator[None, None]:
        """Wait for a slot and hold it.

        Raises:
            Overloaded: too many are waiting already.
        """
        if self._free.locked() and self.waiting >= self._waiting_max:
            raise Overloaded(
                "the server is busy and its queue is full",
                hint="try again in a moment",
                retry_after_s=_RETRY_AFTER_S,
            )
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        self.answering += 1
        try:
            yield
        finally:
            self.answering -= 1
            self._free.release()

    @contextmanager
    def share(self, session: Hashable) -> Generator[None, None, None]:
        """Hold one of a session's own places beside a slot, so that none takes all slots.

        Raises:
            TooManyRequests: the session holds as many as it may.
        """
        if self._sessions[session] >= self._per_session_max:
            raise TooManyRequests(
                f"this session has {self._per_session_max} requests under way already",
                hint="wait for one of them to end",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._sessions[session] += 1
        try:
            yield
        finally:
            self._sessions[session] -= 1
            if not self._sessions[session]:
                del self._sessions[session]
