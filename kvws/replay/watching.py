"""Running a replay to its end, on disk as well, and telling from outside how far it is."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiofiles

from kvws.replay.report import step_as_json
from kvws.replay.run import ReplayedStep, SessionReplay
from kvws.session.durable import Acknowledgement

_log = logging.getLogger("kvws.replay")

_WriteLine = Callable[[ReplayedStep, int], Awaitable[None]]
"""Called with a finished step and the number of blocks acknowledged by then."""


async def watched_steps(
    run: SessionReplay, lines: Path | None = None
) -> AsyncGenerator[ReplayedStep, None]:
    """Run a replay to its end, until all its blocks are durable if it has a store.

    Args:
        lines: gets one line of JSON as each step ends.
    """
    durable = Acknowledgement(run.workspace, run.engine)
    async with AsyncExitStack() as on_leaving:
        on_leaving.push_async_callback(run.workspace.journal.close)
        if run.workspace.is_durable:
            await durable.look()
            await on_leaving.enter_async_context(durable.watched())
        write = None
        if lines is not None:
            write = await on_leaving.enter_async_context(_step_lines(lines))
        async for step in run.steps():
            if write is not None:
                await write(step, durable.blocks)
            yield step
        if run.workspace.is_durable:
            await durable.complete()


@contextlib.asynccontextmanager
async def _step_lines(path: Path) -> AsyncGenerator[_WriteLine]:
    """Continue a file by one line for every step it is called with, at once readable."""
    async with aiofiles.open(path, "a", encoding="utf-8") as opened:
        file: Any = opened

        async def write(step: ReplayedStep, acknowledged_blocks: int) -> None:
            line = {**step_as_json(step), "acknowledged_blocks": acknowledged_blocks}
            try:
                await file.write(json.dumps(line) + "\n")
                await file.flush()
            except OSError as error:  # who watches misses a line; the replay goes on
                _log.warning("%s cannot be written: %s", path, error)

        yield write
