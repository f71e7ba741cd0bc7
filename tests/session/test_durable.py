"""What is acknowledged, and when."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from kvws.errors import ControlError, OtherModel, StoreError
from kvws.session.commit import Commit
from kvws.session.durable import Acknowledgement, open_workspace, reopen
from kvws.session.journal import NullJournal, SessionJournal
from kvws.session.workspace import Workspace
from kvws.store.directory import StoreDirectory
from kvws.store.identity import ModelIdentity
from kvws.store.posix import PosixStorage
from tests.step.session import in_loop

IDENTITY = ModelIdentity("m", "aa", "bb", "float32", 2, 1, 8, 1, 32)


class Ranks:
    """The part of an engine that keeps blocks."""

    def __init__(self, held: set[int] | None = None) -> None:
        self.held = held or set()
        self.unsaved: list[int] = []
        self.forgotten: list[int] = []
        self.asked: list[str] = []
        self.dropped: list[str] = []
        self.refuses: Exception | None = None

    async def attach(self, workspace: str, directory: str) -> frozenset[int]:
        self.asked.append(directory)
        if self.refuses is not None:
            raise self.refuses
        return frozenset(self.held)

    async def drop_workspace(self, workspace: str) -> None:
        self.dropped.append(workspace)

    async def forget(self, workspace: str, blocks: Any) -> None:
        self.forgotten += blocks

    async def unsaved_blocks(self, workspace: str) -> int:
        await asyncio.sleep(0)
        return self.unsaved.pop(0) if len(self.unsaved) > 1 else (self.unsaved or [0])[0]


class SlowJournal(NullJournal):
    """Syncs when it is told to."""

    def __init__(self) -> None:
        self.may_sync = True
        self.acknowledged: list[int] = []

    async def sync(self) -> bool:
        await asyncio.sleep(0)
        if self.may_sync:
            self.synced_bytes += 100
        return self.may_sync

    def acknowledge(self, offset: int) -> None:
        self.acknowledged.append(offset)


def workspace_of(blocks: int) -> Workspace:
    workspace = Workspace("w")
    workspace.journal = SlowJournal()
    line = tuple(workspace.allocate((), range(32 * blocks)))
    workspace.record(workspace.thread("main"), line, line, line)
    return workspace


@in_loop
async def test_blocks_are_acknowledged_once_log_and_ranks_have_them() -> None:
    workspace, ranks = workspace_of(5), Ranks()
    journal = workspace.journal
    assert isinstance(journal, SlowJournal)
    durable = Acknowledgement(workspace, ranks)  # type: ignore[arg-type]
    journal.may_sync = False
    assert await durable.look() == -1 and durable.blocks == 0
    journal.may_sync = True
    ranks.unsaved = [2]
    assert await durable.look() == 2 and durable.blocks == 0 and not journal.acknowledged
    ranks.unsaved = []
    assert await durable.look() == 0 and durable.blocks == 5
    assert journal.acknowledged == [journal.synced_bytes]


@in_loop
async def test_blocks_that_come_while_it_is_asked_are_not_counted() -> None:
    workspace, ranks = workspace_of(3), Ranks()
    durable = Acknowledgement(workspace, ranks)  # type: ignore[arg-type]
    looking = asyncio.create_task(durable.look())
    await asyncio.sleep(0)
    workspace.allocate((), range(32 * 9))
    await looking
    assert durable.blocks == 3


@in_loop
async def test_blocks_that_are_being_registered_are_not_counted() -> None:
    """They may be taken back."""
    workspace, ranks = workspace_of(3), Ranks()
    durable = Acknowledgement(workspace, ranks)  # type: ignore[arg-type]
    async with workspace.registration:
        fresh = workspace.allocate((0, 1, 2), range(32 * 4))
        looking = asyncio.create_task(durable.look())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not looking.done()
        workspace.take_back(fresh)
    await looking
    assert durable.blocks == 3


@in_loop
async def test_completing_waits_as_long_as_the_disk_gets_on() -> None:
    workspace, ranks = workspace_of(3), Ranks()
    ranks.unsaved = [9, 7, 5, 3, 1, 0]
    durable = Acknowledgement(workspace, ranks)  # type: ignore[arg-type]
    assert await durable.complete(patience_s=0.2) and durable.blocks == 3


@pytest.mark.parametrize("what", ["ranks", "journal"])
@in_loop
async def test_completing_gives_a_disk_up_that_takes_nothing(what: str) -> None:
    workspace, ranks = workspace_of(3), Ranks()
    assert isinstance(workspace.journal, SlowJournal)
    workspace.journal.may_sync = what != "journal"
    ranks.unsaved = [4] if what == "ranks" else []
    durable = Acknowledgement(workspace, ranks)  # type: ignore[arg-type]
    begin = time.monotonic()
    assert not await durable.complete(patience_s=0.1)
    assert 0.1 <= time.monotonic() - begin < 5 and durable.blocks == 0


@in_loop
async def test_it_is_kept_up_to_date_in_the_background() -> None:
    workspace, ranks = workspace_of(3), Ranks()
    durable = Acknowledgement(workspace, ranks)  # type: ignore[arg-type]
    async with durable.watched():
        for _ in range(100):
            if durable.blocks == 3:
                break
            await asyncio.sleep(0.01)
        assert durable.blocks == 3
        ranks.unsaved_blocks = None  # type: ignore[method-assign]  # and is not asked any more
        await asyncio.sleep(0.12)


@in_loop
async def test_without_a_store_a_workspace_ends_with_its_process() -> None:
    ranks = Ranks()
    workspace, restored = await open_workspace("w", ranks, None, IDENTITY)  # type: ignore[arg-type]
    assert not workspace.is_durable and not restored.steps and not ranks.asked
    workspace.journal.append(Commit())
    assert not await workspace.journal.sync()


@in_loop
async def test_a_workspace_is_opened_where_the_store_keeps_it(tmp_path: Path) -> None:
    ranks = Ranks()
    with StoreDirectory.open(tmp_path, PosixStorage(tmp_path)) as store:
        workspace, _ = await open_workspace("a/../b", ranks, store, IDENTITY)  # type: ignore[arg-type]
        assert ranks.asked == [str(store.workspace_path("a/../b"))]
        assert workspace.is_durable and workspace.name == "a/../b"
        line = tuple(workspace.allocate((), range(64)))
        workspace.record(workspace.thread("main"), line, line, line)
        await workspace.journal.close()

        ranks = Ranks({0, 1, 7})
        workspace, restored = await open_workspace("a/../b", ranks, store, IDENTITY)  # type: ignore[arg-type]
        assert workspace.thread("main").line == (0, 1) and restored.blocks == 2
        assert ranks.forgotten == [7] and workspace.block_count == 8
        await workspace.journal.close()

        other = ModelIdentity("n", "cc", "bb", "float32", 2, 1, 8, 1, 32)
        with pytest.raises(OtherModel):
            await open_workspace("a/../b", ranks, store, other)  # type: ignore[arg-type]


@in_loop
async def test_ranks_let_go_of_a_workspace_whose_log_cannot_be_opened(tmp_path: Path) -> None:
    """Or it could not be opened again once the disk is well."""
    ranks = Ranks()
    (tmp_path / "session.log").mkdir()
    with pytest.raises(StoreError, match="cannot be used"):
        await reopen("w", ranks, tmp_path)  # type: ignore[arg-type]
    assert ranks.dropped == ["w"]


@in_loop
async def test_all_ranks_let_go_of_a_workspace_that_one_refuses(tmp_path: Path) -> None:
    """The others have attached it, and would refuse the next opening instead of that one."""
    ranks = Ranks()
    ranks.refuses = StoreError("damaged")
    with pytest.raises(StoreError, match="damaged"):
        await reopen("w", ranks, tmp_path)  # type: ignore[arg-type]
    assert ranks.dropped == ["w"]


@in_loop
async def test_ranks_that_refuse_leave_the_log_as_it_is(tmp_path: Path) -> None:
    journal, _ = await SessionJournal.open(tmp_path / "session.log")
    journal.append(Commit(note=1))
    await journal.close()
    before = (tmp_path / "session.log").read_bytes()
    ranks = Ranks()
    ranks.refuses = ControlError("no")
    with pytest.raises(ControlError):
        await reopen("w", ranks, tmp_path)  # type: ignore[arg-type]
    assert (tmp_path / "session.log").read_bytes() == before
