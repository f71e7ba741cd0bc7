"""Work whose end is awaited even by those who no longer want its result."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def uninterrupted(work: Coroutine[Any, Any, None]) -> None:
    """Do what may not be left half done: threads and ranks finish what they were asked for, and
    who came next would meet them in the middle of it.

    A caller that is cancelled meanwhile, once or often, hears of it when the work has ended; how
    that failed, if it did, is the cause.
    """
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from (None if task.cancelled() else task.exception())
    task.result()
