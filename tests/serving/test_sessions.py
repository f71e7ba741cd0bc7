"""Sessions that leave memory and come back, and those that do not."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvws.chat.message import Message
from kvws.errors import ControlError, OtherModel, StoreError
from kvws.store.identity import ModelIdentity
from tests.serving.rig import IDENTITY, Rig
from tests.serving.stored import (
    RESPELLED,
    a_few_steps,
    asker,
    assert_goes_on,
    closed,
    saved,
    sessions_of,
    stored,
)
from tests.serving.test_turns import SYSTEM, TASK, result
from tests.step.session import in_loop


@pytest.fixture
def rig(smollm2: Path, tmp_path: Path) -> Iterator[Rig]:
    with stored(smollm2, tmp_path / "store") as rig:
        yield rig


# ---- leaving and coming back -----------------------------------------------------------------


@in_loop
async def test_an_idle_session_leaves_memory_and_comes_back_with_all_it_knew(rig: Rig) -> None:
    history = await a_few_steps(rig)
    workspace = rig.workspace("s1")
    name, blocks = workspace.name, workspace.registered_blocks
    await closed(sessions_of(rig))
    assert not rig.engine.resident(name) and not (await rig.engine.stats())[0]["blocks"]
    await assert_goes_on(rig, history)
    assert rig.workspace("s1") is not workspace
    assert rig.workspace("s1").registered_blocks > blocks
    rig.workspace("s1").check_integrity()
    rig.engine.check_blocks(name)


@in_loop
async def test_a_session_that_came_back_can_leave_again(rig: Rig) -> None:
    history = await a_few_steps(rig)
    for number in range(3):
        await closed(sessions_of(rig))
        said = await rig.say("Looking.", history)
        history += [said.message, result(10 + number, 8)]
        assert said.computed_tokens < len(rig.words.encode(RESPELLED))


def test_a_session_outlives_a_kill(smollm2: Path, tmp_path: Path) -> None:
    """What a kill -9 leaves is what the files hold at that moment."""
    before, after = tmp_path / "before", tmp_path / "after"

    async def live(rig: Rig) -> list[Message]:
        history = await a_few_steps(rig)
        await saved(rig)
        shutil.copytree(before, after)
        return history

    with stored(smollm2, before) as rig:
        history = asyncio.run(live(rig))
        with stored(smollm2, after, heir_of=rig) as heir:
            asyncio.run(assert_goes_on(heir, history))


def test_a_kill_in_the_middle_costs_what_was_not_saved_and_no_more(
    smollm2: Path, tmp_path: Path
) -> None:
    before, after = tmp_path / "before", tmp_path / "after"

    async def live(rig: Rig) -> list[Message]:
        history = await a_few_steps(rig)
        shutil.copytree(before, after)
        return history

    async def live_on(rig: Rig, history: list[Message]) -> None:
        heard = await rig.say("Done.", history)
        assert heard.text == "Done."
        await assert_goes_on(rig, [*history, heard.message, result(7, 8)])
        workspace = rig.workspace("s1")
        workspace.check_integrity()
        rig.engine.check_blocks(workspace.name)

    with stored(smollm2, before) as rig:
        history = asyncio.run(live(rig))
        with stored(smollm2, after, heir_of=rig) as heir:
            asyncio.run(live_on(heir, history))


# ---- closing ---------------------------------------------------------------------------------


@in_loop
async def test_a_session_stays_until_the_disk_has_all_of_it(rig: Rig) -> None:
    await a_few_steps(rig)
    sessions = sessions_of(rig)
    really_unsaved = rig.engine.unsaved_blocks

    async def unsaved(workspace: str) -> int:
        return 1 + await really_unsaved(workspace)

    rig.engine.unsaved_blocks = unsaved
    for _ in range(3):
        await sessions.close_idle()
    assert len(sessions.open_sessions) == 1
    rig.engine.unsaved_blocks = really_unsaved
    await closed(sessions)


@in_loop
async def test_a_session_in_use_and_a_session_not_idle_stay(rig: Rig) -> None:
    await a_few_steps(rig)
    await saved(rig)
    sessions = sessions_of(rig)
    async with sessions.using(asker("s1")):
        await sessions.close_idle()
        assert len(sessions.open_sessions) == 1
    await sessions_of(rig, idle_s=60).close_idle()
    assert len(sessions.open_sessions) == 1
    await sessions_of(rig).close_idle()
    assert not sessions.open_sessions


@in_loop
async def test_who_calls_while_a_session_is_closed_waits_and_finds_it_again(rig: Rig) -> None:
    history = await a_few_steps(rig)
    await saved(rig)
    sessions = sessions_of(rig)
    closing, go_on = asyncio.Event(), asyncio.Event()
    really_drop = rig.engine.drop_workspace

    async def drop(workspace: str) -> None:
        closing.set()
        await go_on.wait()
        await really_drop(workspace)

    rig.engine.drop_workspace = drop
    leaving = asyncio.create_task(sessions.close_idle())
    await closing.wait()
    coming = asyncio.create_task(assert_goes_on(rig, history))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not coming.done()
    go_on.set()
    await leaving
    await coming


@in_loop
async def test_a_session_that_cannot_be_dropped_stays_usable(rig: Rig) -> None:
    history = await a_few_steps(rig)
    await saved(rig)
    sessions = sessions_of(rig)
    really_drop = rig.engine.drop_workspace

    async def refuse(workspace: str) -> None:
        raise ControlError("not now")

    rig.engine.drop_workspace = refuse
    await sessions.close_idle()
    assert len(sessions.open_sessions) == 1
    rig.engine.drop_workspace = really_drop
    await assert_goes_on(rig, history)


# ---- opening ---------------------------------------------------------------------------------


@in_loop
async def test_calls_that_come_first_at_once_open_their_session_once(rig: Rig) -> None:
    attached: list[str] = []
    really_attach = rig.engine.attach

    async def attach(workspace: str, directory: str) -> frozenset[int]:
        attached.append(workspace)
        await asyncio.sleep(0.01)
        return await really_attach(workspace, directory)

    rig.engine.attach = attach
    sessions = sessions_of(rig)

    async def use(session: str) -> int:
        async with sessions.using(asker(session)) as found:
            return id(found)

    found = await asyncio.gather(*(use(f"s{number % 2}") for number in range(12)))
    assert len(attached) == len(set(attached)) == 2
    assert len(set(found)) == 2 and len(sessions.open_sessions) == 2
    assert not len(sessions._doors)


@pytest.mark.parametrize("error", [ControlError("no"), StoreError("no"), OSError(5, "no")])
@in_loop
async def test_a_session_that_could_not_be_opened_can_be_opened_later(
    error: Exception, rig: Rig
) -> None:
    really_attach = rig.engine.attach

    async def refuse(workspace: str, directory: str) -> frozenset[int]:
        raise error

    rig.engine.attach = refuse
    for _ in range(2):
        with pytest.raises(type(error)):
            await rig.say("Hello.", [SYSTEM, TASK])
    sessions = sessions_of(rig)
    assert not sessions.open_sessions and not len(sessions._doors)
    rig.engine.attach = really_attach
    rig.script.play([])
    await assert_goes_on(rig, await a_few_steps(rig))


@pytest.mark.parametrize("leaves_while", ["its folder is made", "a rank reads it"])
@in_loop
async def test_who_asks_next_finds_the_session_that_another_left_while_it_was_opened(
    leaves_while: str, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = sessions_of(rig)
    assert sessions._store is not None
    begun, may_end, attached = asyncio.Event(), threading.Event(), list[str]()
    loop = asyncio.get_running_loop()
    really_make, really_attach = sessions._store.open_workspace, rig.engine.attach

    def stand() -> None:
        loop.call_soon_threadsafe(begun.set)
        may_end.wait(20)

    def make(name: str, identity: ModelIdentity) -> Path:
        if leaves_while == "its folder is made":
            stand()
        return really_make(name, identity)

    async def attach(workspace: str, directory: str) -> frozenset[int]:
        attached.append(workspace)
        held = await really_attach(workspace, directory)
        if leaves_while == "a rank reads it":
            await asyncio.to_thread(stand)
        return held

    monkeypatch.setattr(sessions._store, "open_workspace", make)
    monkeypatch.setattr(rig.engine, "attach", attach)
    leaving = asyncio.create_task(rig.say("Hello.", [SYSTEM, TASK]))
    await begun.wait()
    next_one = asyncio.create_task(a_few_steps(rig))
    for _ in range(3):  # an impatient server says so more than once
        leaving.cancel()
        await asyncio.sleep(0.01)
    assert not next_one.done()
    may_end.set()
    await asyncio.wait({leaving})
    assert leaving.cancelled()
    await assert_goes_on(rig, await next_one)
    assert len(attached) == 1 and not len(sessions._doors)
    assert all(session.users == 0 for session in sessions.open_sessions.values())


@in_loop
async def test_a_caller_that_leaves_at_any_moment_leaves_nothing_behind(rig: Rig) -> None:
    sessions = sessions_of(rig)

    async def use() -> None:
        async with sessions.using(asker("s1")):
            await asyncio.sleep(0.001)

    for turns in range(0, 60, 3):
        task = asyncio.create_task(use())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        assert not len(sessions._doors)
        assert all(session.users == 0 for session in sessions.open_sessions.values())
        await closed(sessions)
    await assert_goes_on(rig, await a_few_steps(rig))


@in_loop
async def test_a_session_of_another_model_is_refused_and_the_others_go_on(rig: Rig) -> None:
    sessions = sessions_of(rig)
    store = sessions._store
    assert store is not None
    theirs = replace(IDENTITY, weights="1" * 32)
    folder = store.open_workspace(asker("s1").workspace, theirs)
    before = sorted((path, path.stat().st_size) for path in folder.rglob("*"))
    with pytest.raises(OtherModel) as refused:
        await rig.say("Hello.", [SYSTEM, TASK], session="s1")
    assert refused.value.http_status == 409 and refused.value.hint
    assert "other weights" in str(refused.value)
    assert sorted((path, path.stat().st_size) for path in folder.rglob("*")) == before
    rig.script.play([])
    history = await a_few_steps(rig, session="s2")
    await assert_goes_on(rig, history, session="s2")
