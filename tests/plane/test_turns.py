"""Turns: one holder at a time, and nobody waits behind another name's queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from kvws.engine.turns import FairTurns


class Queue:
    """Askers who note their turn, and keep it until they are let go."""

    def __init__(self) -> None:
        self.turns = FairTurns()
        self.had: list[str] = []
        self.holders = 0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._go = asyncio.Event()

    async def ask(self, *askers: str) -> None:
        """The first letter of an asker is its name."""
        for asker in askers:
            self._tasks[asker] = asyncio.create_task(self._hold(asker))
            await asyncio.sleep(0)

    async def _hold(self, asker: str) -> None:
        async with self.turns.turn(asker[0]):
            self.holders += 1
            assert self.holders == 1, "two have the turn"
            self.had.append(asker)
            try:
                await self._go.wait()
            finally:
                self.holders -= 1

    async def give_up(self, asker: str) -> None:
        self._tasks[asker].cancel()
        with pytest.raises(asyncio.CancelledError):
            await self._tasks.pop(asker)

    async def let_all_go(self) -> list[str]:
        self._go.set()
        async with asyncio.timeout(5):
            await asyncio.gather(*self._tasks.values())
        assert self.turns.waiting == 0
        async with self.turns.turn("anyone"):
            pass
        return self.had


def run(scenario: Callable[[Queue], Coroutine[Any, Any, None]]) -> Sequence[str]:
    async def go() -> Sequence[str]:
        queue = Queue()
        await scenario(queue)
        return await queue.let_all_go()

    return asyncio.run(go())


def test_a_name_that_asks_often_waits_behind_one_that_asks_once() -> None:
    async def scenario(queue: Queue) -> None:
        await queue.ask("a1", "a2", "a3", "a4", "b1", "c1", "b2")

    assert run(scenario) == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


def test_one_name_is_served_in_the_order_of_asking() -> None:
    async def scenario(queue: Queue) -> None:
        await queue.ask("a1", "a2", "a3")

    assert run(scenario) == ["a1", "a2", "a3"]


def test_who_gives_up_while_waiting_leaves_no_gap() -> None:
    async def scenario(queue: Queue) -> None:
        await queue.ask("a1", "b1", "c1", "c2")
        await queue.give_up("b1")
        await queue.give_up("c1")

    assert run(scenario) == ["a1", "c2"]


def test_who_gives_up_while_holding_passes_the_turn_on() -> None:
    async def scenario(queue: Queue) -> None:
        await queue.ask("a1", "b1")
        await queue.give_up("a1")

    assert run(scenario) == ["a1", "b1"]


def test_a_turn_given_to_one_who_gives_up_at_that_moment_is_not_lost() -> None:
    async def scenario(queue: Queue) -> None:
        await queue.ask("a1", "b1", "c1")
        holder = queue._tasks.pop("a1")
        holder.cancel()
        await asyncio.sleep(0)  # a1 hands its turn to b1, who has not run yet
        await queue.give_up("b1")
        assert holder.cancelled()

    assert run(scenario) == ["a1", "c1"]
