"""Work for a client that may go away in the middle of it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.requests import ClientDisconnect

from kvws.http.incoming import Incoming


async def while_connected(incoming: Incoming, work: Coroutine[Any, Any, None]) -> None:
    """Do `work` while `incoming` is watched; it is cancelled as soon as the client has gone.

    Raises:
        ClientDisconnect: the client has gone before the work was done.
    """
    doing = asyncio.create_task(work)
    watching = asyncio.create_task(incoming.watch())
    try:
        await asyncio.wait({doing, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            watching.result()
            raise ClientDisconnect
        doing.result()
    finally:
        await ended(doing)
        await ended(watching)


async def ended(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for it to end; what it raises on the way no longer matters."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
