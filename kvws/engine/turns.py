"""Turns at something that only one can do at a time, shared out fairly."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class FairTurns:
    """One holder at a time. Names take turns, so that whoever asks often does not keep the others
    waiting; those of one name come in the order in which they asked."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By name, in the order of their turns: at least one ticket each."""

    @property
    def waiting(self) -> int:
        """Names that wait."""
        return len(self._waiting)

    @asynccontextmanager
    async def turn(self, name: str) -> AsyncGenerator[None]:
        """Wait for a turn of this name and hold it."""
        if self._taken:
            await self._wait(name)
        self._taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, name: str) -> None:
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, deque()).append(ticket)
        try:
            await ticket
        except asyncio.CancelledError:
            if ticket.cancelled():
                self._forget(name, ticket)
            else:  # the turn had been passed on to it
                self._pass_on()
            raise

    def _forget(self, name: str, ticket: asyncio.Future[None]) -> None:
        tickets = self._waiting[name]
        tickets.remove(ticket)
        if not tickets:
            del self._waiting[name]

    def _pass_on(self) -> None:
        """Give the turn to the next name; it goes behind the others if it waits for more."""
        for name, tickets in self._waiting.items():
            ticket = tickets.popleft()
            del self._waiting[name]
            if tickets:
                self._waiting[name] = tickets
            ticket.set_result(None)
            return
        self._taken = False
