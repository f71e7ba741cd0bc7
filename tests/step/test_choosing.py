"""Choosing beside the event loop: one step of a workspace at a time, whoever is cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from contextlib import suppress

import numpy as np
import pytest

from kvws.choosing import choose, read_new_blocks
from kvws.recall.recipe import recipe_named
from kvws.recall.regions import Regions
from kvws.recall.selector import Asked, Choice, Selector
from kvws.session.workspace import Workspace

ASKED = Asked((), (), np.ones(0, np.uint8), Regions.of_line((), 0, 0), np.ones(0), frozenset(), 1)


class SlowSelector(Selector):
    """Chooses until it is told to finish, and says what it is doing meanwhile."""

    def __init__(self) -> None:
        super().__init__(recipe_named("mean-k"))
        self.may_finish = threading.Event()
        self.begun = threading.Event()
        self.doing: list[str] = []

    def choose(self, asked: Asked, by_rank_signal: Mapping[object, object]) -> Choice:
        self.doing.append("choosing")
        self.begun.set()
        assert self.may_finish.wait(10)
        self.doing.append("chosen")
        return Choice((), ())

    def catch_up(self, log: object, at_most: int) -> bool:
        self.doing.append("read")
        return True


@pytest.fixture
def slow() -> tuple[Workspace, SlowSelector]:
    workspace = Workspace("w")
    workspace.selector = selector = SlowSelector()
    return workspace, selector


async def begun(selector: SlowSelector) -> None:
    assert await asyncio.to_thread(selector.begun.wait, 10)


def test_the_event_loop_goes_on_meanwhile(slow: tuple[Workspace, SlowSelector]) -> None:
    workspace, selector = slow

    async def run() -> Choice:
        choosing = asyncio.create_task(choose(workspace, ASKED, {}))
        await begun(selector)
        assert not choosing.done()
        selector.may_finish.set()
        return await choosing

    assert asyncio.run(run()) == Choice((), ())


@pytest.mark.parametrize("leaves", [False, True])
def test_nobody_reads_blocks_while_the_thread_chooses(
    slow: tuple[Workspace, SlowSelector], leaves: bool
) -> None:
    workspace, selector = slow

    async def run() -> None:
        choosing = asyncio.create_task(choose(workspace, ASKED, {}))
        await begun(selector)
        if leaves:  # its client is gone, but the thread is at work
            choosing.cancel()
            with suppress(asyncio.CancelledError):
                await choosing
        reading = asyncio.create_task(read_new_blocks(workspace))
        await asyncio.sleep(0.05)
        assert selector.doing == ["choosing"]
        selector.may_finish.set()
        await reading

    asyncio.run(run())
    assert selector.doing == ["choosing", "chosen", "read"]


def test_a_fault_leaves_the_selector_free(slow: tuple[Workspace, SlowSelector]) -> None:
    workspace, selector = slow

    def fail(asked: Asked, by_rank_signal: object) -> Choice:
        raise ValueError("no")

    selector.choose = fail  # type: ignore[method-assign, assignment]

    async def run() -> None:
        with pytest.raises(ValueError, match="no"):
            await choose(workspace, ASKED, {})
        async with asyncio.timeout(5):
            await read_new_blocks(workspace)

    asyncio.run(run())
    assert selector.doing == ["read"]
