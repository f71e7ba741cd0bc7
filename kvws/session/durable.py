"""Workspaces that outlive their process: opening one again, and knowing what is durable."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from kvws.engine.protocol import Engine
from kvws.errors import KvwsError, StoreError
from kvws.session.commit import Commit
from kvws.session.journal import SESSION_LOG, SessionJournal
from kvws.session.restore import Restored, restore
from kvws.session.workspace import Workspace
from kvws.store.directory import StoreDirectory
from kvws.store.identity import ModelIdentity

_POLL_S = 0.05
_PATIENCE_S = 20.0
"""A disk that saves no block for so long is taken to be in trouble."""

_FORGET_AT_ONCE = 10_000
"""Blocks a message names at most."""

_log = logging.getLogger("kvws.session")


async def open_workspace(
    name: str, engine: Engine, store: StoreDirectory | None, identity: ModelIdentity
) -> tuple[Workspace, Restored]:
    """Open a workspace of the store, or make it; without a store it ends with its process.

    Raises:
        StoreError: it was written with another model, is damaged, or the disk fails.
    """
    if store is None:
        return Workspace(name), Restored()
    try:
        folder = await asyncio.to_thread(store.open_workspace, name, identity)
    except OSError as error:
        raise StoreError(
            f"workspace {name} cannot be opened: {error}", hint="check the disk of --disk-dir"
        ) from error
    return await reopen(name, engine, folder)


async def reopen(name: str, engine: Engine, folder: Path) -> tuple[Workspace, Restored]:
    """Bring a workspace and its ranks to what its folder holds."""
    try:
        held = await engine.attach(name, str(folder))
        return await _restored(name, engine, folder, held)
    except BaseException:
        # Where one rank refuses, others have attached it. So that it can be opened again:
        await engine.drop_workspace(name)
        raise


async def _restored(
    name: str, engine: Engine, folder: Path, held: frozenset[int]
) -> tuple[Workspace, Restored]:
    journal, log = await SessionJournal.open(folder / SESSION_LOG)
    try:
        workspace, restored = await asyncio.to_thread(restore, name, log, held)
        for numbers in _batches(restored.to_forget):
            await engine.forget(name, numbers)
        if restored.void_from is not None:
            journal.append(Commit(void_from=restored.void_from))
            await journal.sync()
    except BaseException:
        await journal.close()
        raise
    workspace.journal = journal
    if restored.acknowledged_lost:
        _log.error("%s: %d durable blocks are gone", name, restored.acknowledged_lost)
    return workspace, restored


class Acknowledgement:
    """How much of a workspace survives a power loss.

    Attributes:
        blocks: registered blocks whose commit and whose bytes on every rank are durable; never
            more than there are, at times fewer.
    """

    def __init__(self, workspace: Workspace, engine: Engine) -> None:
        self.blocks = 0
        self._workspace = workspace
        self._engine = engine

    async def look(self) -> int:
        """Ask once.

        Returns:
            Blocks that some rank has not saved yet, or -1 if the journal could not be synced.
            0: everything registered before the call is acknowledged.
        """
        workspace = self._workspace
        async with workspace.registration:
            registered = workspace.registered_blocks
        if not await workspace.journal.sync():
            return -1
        # Asked after the sync: every block of a commit before this offset is counted.
        offset = workspace.journal.synced_bytes
        unsaved = await self._engine.unsaved_blocks(workspace.name)
        if unsaved == 0:
            self.blocks = registered
            workspace.journal.acknowledge(offset)
        return unsaved

    async def complete(self, *, patience_s: float = _PATIENCE_S) -> bool:
        """Wait until everything registered so far is acknowledged.

        Returns:
            False when nothing was saved for `patience_s`: the disk is full or fails.
        """
        fewest: int | None = None
        deadline = time.monotonic() + patience_s
        while True:
            unsaved = await self.look()
            if unsaved == 0:
                return True
            if unsaved > 0 and (fewest is None or unsaved < fewest):
                fewest, deadline = unsaved, time.monotonic() + patience_s
            if time.monotonic() > deadline:
                _log.warning("%s: the disk does not take its blocks", self._workspace.name)
                return False
            await asyncio.sleep(_POLL_S)

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncGenerator[None]:
        """Keep `blocks` up to date in the background."""

        async def watch() -> None:
            while True:
                if self._workspace.registered_blocks > self.blocks:
                    await self.look()
                await asyncio.sleep(_POLL_S)

        task = asyncio.create_task(watch())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, KvwsError):
                await task


def _batches(numbers: Sequence[int]) -> list[Sequence[int]]:
    return [
        numbers[start : start + _FORGET_AT_ONCE]
        for start in range(0, len(numbers), _FORGET_AT_ONCE)
    ]
