"""Engines whose tests can run out of time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from typing import Any

import pytest

from kvws.engine.launch import RunningEngine, running_engine
from kvws.engine.settings import EngineSettings


@contextlib.contextmanager
def timed_engine(settings: EngineSettings) -> Generator[RunningEngine]:
    """A started engine; a test that waits for it longer than it may fails."""
    with running_engine(settings) as running:
        let_timeouts_through(running._loop)
        yield running


def let_timeouts_through(loop: asyncio.AbstractEventLoop) -> None:
    """End what the loop runs when a test's time is up.

    The failure is raised where the main thread is, which is in the loop, and SGLang's loop hands
    on no exception of a handler: it logs it, and the test would wait for ever.
    """

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if isinstance(context.get("exception"), pytest.fail.Exception):
            loop.stop()
        loop.default_exception_handler(context)

    loop.set_exception_handler(handle)
