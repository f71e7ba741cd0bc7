"""What is done for sessions while nobody asks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvws.errors import ControlError
from kvws.serving import sessions as sessions_module
from kvws.serving.named_locks import NamedLocks
from tests.serving.rig import Rig
from tests.serving.stored import (
    a_few_steps,
    asker,
    assert_goes_on,
    sessions_of,
    stored,
)
from tests.serving.test_turns import SYSTEM, TASK
from tests.step.session import in_loop


@pytest.fixture
def rig(smollm2: Path, tmp_path: Path) -> Iterator[Rig]:
    with stored(smollm2, tmp_path / "store") as rig:
        yield rig


# ---- looking after them ----------------------------------------------------------------------


@asynccontextmanager
async def maintained(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[None]:
    monkeypatch.setattr(sessions_module, "_ACKNOWLEDGE_EVERY_S", 0.01)
    monkeypatch.setattr(sessions_module, "_LOOK_FOR_IDLE_EVERY_S", 0.02)
    async with rig.service.running():
        yield


async def until(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def test_the_trouble_of_one_session_is_not_anothers(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def live(rig: Rig) -> None:
        sessions = sessions_of(rig, idle_s=3600)
        for session in ("s1", "s2"):
            await a_few_steps(rig, session=session, steps=1)
        troubled, well = sessions.open_sessions.values()
        really_unsaved = rig.engine.unsaved_blocks
        asked = 0

        async def unsaved(workspace: str) -> int:
            nonlocal asked
            if workspace != troubled.workspace.name:
                return await really_unsaved(workspace)
            asked += 1
            raise (ControlError("no"), RuntimeError("a fault"))[asked % 2]

        rig.engine.unsaved_blocks = unsaved
        async with maintained(rig, monkeypatch):
            blocks = well.workspace.registered_blocks
            await until(lambda: well.acknowledgement.blocks == blocks and asked > 4)
            assert troubled.acknowledgement.blocks == 0
            sessions._idle_s = -1.0
            await until(lambda: list(sessions.open_sessions.values()) == [troubled])
            rig.engine.unsaved_blocks = really_unsaved
            await until(lambda: not sessions.open_sessions)

    with stored(smollm2, tmp_path / "store") as rig:
        asyncio.run(live(rig))


@in_loop
async def test_draining_tells_how_much_is_left_and_ends_with_everything_on_disk(
    rig: Rig,
) -> None:
    for session in ("s1", "s2"):
        await a_few_steps(rig, session=session, steps=1)
    left = {session.workspace.name: 4 for session in rig.service.open_sessions.values()}

    async def unsaved(workspace: str) -> int:
        left[workspace] -= 1
        return left[workspace] + 1

    rig.engine.unsaved_blocks = unsaved
    told: list[int] = []
    assert await rig.service.drain(told.append)
    assert told == [8, 6, 4, 2, 0]
    for session in rig.service.open_sessions.values():
        assert session.acknowledgement.blocks == session.workspace.registered_blocks


@pytest.mark.parametrize("trouble", ["stuck", "refusing"])
@in_loop
async def test_draining_gives_a_disk_up_that_takes_nothing(trouble: str, rig: Rig) -> None:
    for session in ("s1", "s2", "s3"):
        await a_few_steps(rig, session=session, steps=1)
    bad = next(iter(rig.service.open_sessions))
    really_unsaved = rig.engine.unsaved_blocks

    async def unsaved(workspace: str) -> int:
        if workspace != bad:
            return await really_unsaved(workspace)
        if trouble == "refusing":
            raise ControlError("no")
        return 3

    rig.engine.unsaved_blocks = unsaved
    async with asyncio.timeout(20):
        assert not await sessions_of(rig).drain(lambda _: None, patience_s=0.2)
    acknowledged = {
        name: session.acknowledgement.blocks == session.workspace.registered_blocks
        for name, session in rig.service.open_sessions.items()
    }
    assert acknowledged == {name: name != bad for name in acknowledged}


# ---- without a disk --------------------------------------------------------------------------


@in_loop
async def test_sessions_without_a_disk_stay_up_to_a_number(
    smollm2: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "kvws.serving")
    rig = Rig.start(smollm2)
    sessions = sessions_of(rig)
    sessions._kept_without_disk = 3
    histories = {f"s{n}": await a_few_steps(rig, f"s{n}", steps=1) for n in range(3)}
    await sessions.close_idle()
    assert len(sessions.open_sessions) == 3, "never closed while they are few"
    for number in (3, 4):
        histories[f"s{number}"] = await a_few_steps(rig, f"s{number}", steps=1)
    await assert_goes_on(rig, histories["s0"], "s0")  # and s1 is the one that is idle longest
    sessions_of(rig, idle_s=3600)
    await sessions.close_idle()
    assert len(sessions.open_sessions) == 5, "nor while they are not idle"
    sessions_of(rig)
    gone = rig.workspace("s1").name
    async with sessions.using(asker("s2")):
        await sessions.close_idle()
    stayed = {session.name for session in sessions.open_sessions.values()}
    assert stayed == {"s0", "s2", "s4"}
    assert not rig.engine.resident(gone)
    assert [record.message.split()[1] for record in caplog.records] == ["s1", "s3"]
    again = await rig.say("Done.", histories["s1"], session="s1")
    assert again.text == "Done." and again.finished.usage.reused_tokens == 0
    rig.engine.check_idle()


# ---- names -----------------------------------------------------------------------------------


@in_loop
async def test_a_lock_is_kept_for_as_long_as_somebody_wants_it() -> None:
    locks = NamedLocks()
    order: list[str] = []

    async def take(name: str, mark: str) -> None:
        async with locks.held(name):
            order.append(mark)
            await asyncio.sleep(0.001)
            order.append(mark)

    first = [asyncio.create_task(take("a", mark)) for mark in "123"]
    other = asyncio.create_task(take("b", "b"))
    await asyncio.sleep(0)
    assert len(locks) == 2
    first[1].cancel()
    await asyncio.wait([*first, other])
    assert [mark for mark in order if mark != "b"] == ["1", "1", "3", "3"]
    assert order.index("b") < order.index("3"), "names do not wait for each other"
    assert not len(locks)


@in_loop
async def test_threads_that_are_over_leave_no_lock(smollm2: Path) -> None:
    rig = Rig.start(smollm2)
    for number in range(4):
        await rig.say("Done.", [SYSTEM, TASK], thread=f"agent-{number}")
    (session,) = rig.service.open_sessions.values()
    assert not len(session._turns) and not session.unheard and not session.users
