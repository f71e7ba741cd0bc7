"""A workspace's selector, used beside the event loop and by one step at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from kvws.recall.fusion import Scores
from kvws.recall.recipe import SignalName
from kvws.recall.selector import Asked, Choice
from kvws.session.workspace import Workspace

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


async def choose(
    workspace: Workspace, asked: Asked, by_rank_signal: Mapping[SignalName, Scores]
) -> Choice:
    """`Selector.choose` in a thread: among millions of tokens it takes some ten milliseconds.

    Whoever waits for it may be cancelled, the thread cannot: the selector is free for others only
    when that is done with it.
    """
    await workspace.selecting.acquire()
    work = asyncio.to_thread(workspace.selector.choose, asked, by_rank_signal)
    choosing = asyncio.ensure_future(work)
    choosing.add_done_callback(lambda _: workspace.selecting.release())
    return await asyncio.shield(choosing)
