"""An engine process that dies is noticed by whoever waits for it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvws.engine.liveness import Liveness
from kvws.errors import EngineDied

LOG = Path("engine.log")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield child
    child.kill()
    child.wait()


def test_what_a_living_engine_finishes_is_passed_on(child: subprocess.Popen[bytes]) -> None:
    async def go() -> None:
        liveness = Liveness([child.pid], LOG, poll_seconds=0.01)
        assert await liveness.guard(asyncio.sleep(0.05, "done")) == "done"

        async def refuse() -> None:
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await liveness.guard(refuse())

    asyncio.run(go())


def test_a_killed_engine_ends_the_wait(child: subprocess.Popen[bytes]) -> None:
    async def go() -> None:
        liveness = Liveness([child.pid], LOG, poll_seconds=0.01)
        cancelled = asyncio.Event()

        async def forever() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                cancelled.set()

        asyncio.get_running_loop().call_later(0.05, child.kill)
        with pytest.raises(EngineDied, match=f"{child.pid} is gone") as died:
            await asyncio.wait_for(liveness.guard(forever()), 10)
        assert "engine.log" in died.value.hint
        assert cancelled.is_set()

    asyncio.run(go())


def test_a_zombie_is_dead(child: subprocess.Popen[bytes]) -> None:
    liveness = Liveness([child.pid], LOG)
    liveness.require_alive()
    child.kill()
    child.poll()
    with pytest.raises(EngineDied):
        for _ in range(1000):
            liveness.require_alive()


def test_one_dead_process_of_several_is_enough(child: subprocess.Popen[bytes]) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with pytest.raises(EngineDied, match=str(gone.pid)):
        Liveness([child.pid, gone.pid], LOG).require_alive()


def test_a_caller_that_gives_up_cancels_the_wait(child: subprocess.Popen[bytes]) -> None:
    async def go() -> bool:
        cancelled = False

        async def forever() -> None:
            nonlocal cancelled
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled = True
                raise

        task = asyncio.create_task(Liveness([child.pid], LOG).guard(forever()))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return cancelled

    assert asyncio.run(go())
