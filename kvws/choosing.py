"""A workspace's selector, used beside the event loop and by one step at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TypeVar

from kvws.recall.fusion import Scores
from kvws.recall.recipe import SignalName
from kvws.recall.selector import Asked, Choice
from kvws.session.workspace import Workspace

T = TypeVar("T")

_READ_AT_ONCE_BLOCKS = 64
"""A few milliseconds of the event loop."""


async def read_new_blocks(workspace: Workspace) -> None:
    """Let the selector know what blocks say that it has not read; after a restart they are many,
    and others shall have their turns meanwhile."""
    more = True
    while more:
        async with workspace.selecting:
            more = not workspace.selector.catch_up(workspace, _READ_AT_ONCE_BLOCKS)
        await asyncio.sleep(0)


async def first_look(workspace: Workspace, asked: Asked) -> dict[SignalName, Scores]:
    """`Selector.first_look` in a thread."""
    return await _beside(workspace, lambda: workspace.selector.first_look(asked))


async def choose(
    workspace: Workspace, asked: Asked, by_signal: Mapping[SignalName, Scores]
) -> Choice:
    """`Selector.choose` in a thread."""
    return await _beside(workspace, lambda: workspace.selector.choose(asked, by_signal))


async def _beside(workspace: Workspace, work: Callable[[], T]) -> T:
    """Run what asks the selector beside the event loop: among millions of tokens it takes some ten
    milliseconds.

    Whoever waits for it may be cancelled, the thread cannot: the selector is free for others only
    when that is done with it.
    """
    await workspace.selecting.acquire()
    working = asyncio.ensure_future(asyncio.to_thread(work))
    working.add_done_callback(lambda _: workspace.selecting.release())
    return await asyncio.shield(working)
