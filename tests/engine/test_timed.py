"""A test of an engine that hangs fails when its time is up, and the next one has its turn."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator

import pytest
import uvloop

from tests.engine.timed import let_timeouts_through


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Of SGLang's kind, listening to signals as SGLang has it do."""
    loop = uvloop.new_event_loop()
    loop.add_signal_handler(signal.SIGUSR2, lambda: None)
    yield loop
    loop.close()


@pytest.fixture
def time_is_up() -> Iterator[threading.Timer]:
    """Once started, fails the test soon, as pytest's timeouts do: out of a handler of a signal."""

    def fail(*_: object) -> None:
        pytest.fail("out of time")

    before = signal.signal(signal.SIGUSR1, fail)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1))
    yield timer
    timer.join()
    signal.signal(signal.SIGUSR1, before)


def test_a_hanging_test_fails(
    loop: asyncio.AbstractEventLoop, time_is_up: threading.Timer
) -> None:
    async def hang() -> None:
        time_is_up.start()
        await asyncio.sleep(3600)

    let_timeouts_through(loop)
    with pytest.raises(RuntimeError, match="stopped before Future completed"):
        loop.run_until_complete(hang())
    assert loop.run_until_complete(asyncio.sleep(0, "next")) == "next"


def test_control_without_it_the_failure_is_lost(
    loop: asyncio.AbstractEventLoop, time_is_up: threading.Timer
) -> None:
    async def outlive() -> str:
        time_is_up.start()
        await asyncio.sleep(1.5)  # the loop is idle when time is up, and so nothing else is lost
        return "nothing failed"

    loop.set_exception_handler(lambda *_: None)
    assert loop.run_until_complete(outlive()) == "nothing failed"
