"""A service with a disk tier, and what tests do to its sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvws.chat.message import Message
from kvws.serving.sessions import Asker, Sessions
from kvws.session.caller import Caller
from kvws.store.directory import StoreDirectory
from kvws.store.posix import PosixStorage
from tests.serving.rig import LIMITS, Rig
from tests.serving.test_turns import SYSTEM, TASK, result
from tests.step.simulated_engine import SimulatedEngine

RESPELLED = "   The fault is in one of these lines. " + "I am not sure yet which it is. " * 20
"""A client that strips it tells tokens that are all different."""


@contextmanager
def stored(model: Path, root: Path, heir_of: Rig | None = None, **more: Any) -> Iterator[Rig]:
    """A service with a disk tier."""
    storage = PosixStorage(root.parent)
    if heir_of is not None:
        engine = heir_of.engine.restarted(storage=storage)
    else:
        engine = SimulatedEngine(
            context_tokens=LIMITS.context_tokens,
            device_pages=512,
            host_blocks=20_000,
            chunk_tokens=256,
            storage=storage,
        )
    with StoreDirectory.open(root, storage) as store:
        try:
            yield Rig.start(model, engine=engine, store=store, **more)
        finally:
            engine.plane.close()


def sessions_of(rig: Rig, *, idle_s: float = 0.0) -> Sessions:
    """Where `close_idle` takes every session that is not in use for an idle one."""
    sessions = rig.service._sessions
    sessions._idle_s = idle_s - 1e-3
    return sessions


def asker(session: str, thread: str = "main") -> Asker:
    return Asker(Caller(session, thread, "x-session-id"), "")


async def a_few_steps(rig: Rig, session: str = "s1", steps: int = 3) -> list[Message]:
    """The history as a client tells it, whose next message is news."""
    history = [SYSTEM, TASK]
    for number in range(steps):
        said = await rig.say(f"{RESPELLED} ({number}) ", history, session=session)
        history += [replace(said.message, content=said.text.strip()), result(number, 8)]
    return history


async def assert_goes_on(rig: Rig, history: Sequence[Message], session: str = "s1") -> None:
    """The next call computes its newest message, and none of the turns before it."""
    heard = await rig.say("Done.", history, session=session)
    assert heard.text == "Done."
    new_tokens = len(rig.words.encode(history[-1].content))
    assert heard.computed_tokens < new_tokens + 60 < len(rig.words.encode(RESPELLED))
    await rig.engine.check_integrity()


async def saved(rig: Rig) -> None:
    for session in rig.service.open_sessions.values():
        assert await session.acknowledgement.complete()


async def closed(sessions: Sessions, within_s: float = 20.0) -> None:
    """Close idle sessions until none is left: the disk takes its time."""
    async with asyncio.timeout(within_s):
        while sessions.open_sessions:
            await sessions.close_idle()
            await asyncio.sleep(0.01)
