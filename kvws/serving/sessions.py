"""Open sessions: each a workspace, its transcript, and who is using it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from kvws.engine.protocol import Chunk, Engine
from kvws.errors import KvwsError
from kvws.observe.step_report import StepReport
from kvws.session.caller import Caller
from kvws.session.commit import Commit
from kvws.session.durable import Acknowledgement, open_workspace
from kvws.session.transcript import Transcript
from kvws.session.workspace import Workspace
from kvws.store.directory import StoreDirectory
from kvws.store.identity import ModelIdentity

_KEPT_REPORTS = 50
_ACKNOWLEDGE_EVERY_S = 0.5
_LOOK_FOR_IDLE_EVERY_S = 30.0

_log = logging.getLogger("kvws.serving")


@dataclass(frozen=True)
class Unheard:
    """An answer that its client did not hear to the end.

    Attributes:
        asked: digest of the messages that it answers.
        tokens: generated so far.
        last: its last chunk, if it was generated to the end.
    """

    asked: bytes
    tokens: tuple[int, ...]
    last: Chunk | None


@dataclass
class Session:
    """One agent session.

    Attributes:
        caller: who opened it.
        unheard: by thread, the newest answer, if its client went away.
        reports: of the latest steps.
        steps: so many since it was opened.
        users: requests that are using it now.
        last_used_s: on the monotonic clock.
    """

    caller: Caller
    workspace: Workspace
    acknowledgement: Acknowledgement
    transcript: Transcript = field(default_factory=Transcript)
    unheard: dict[str, Unheard] = field(default_factory=dict[str, Unheard])
    reports: deque[StepReport] = field(default_factory=lambda: deque(maxlen=_KEPT_REPORTS))
    steps: int = 0
    users: int = 0
    last_used_s: float = field(default_factory=time.monotonic)
    _turns: dict[str, asyncio.Lock] = field(default_factory=dict[str, asyncio.Lock])

    def turn(self, thread: str) -> asyncio.Lock:
        """Held while a call of that thread is placed, answered and learned."""
        return self._turns.setdefault(thread, asyncio.Lock())


class Sessions:
    """Opens sessions at their first call, and lets idle ones leave memory.

    Only sessions with a disk below them leave: the others would be lost.
    """

    def __init__(
        self,
        engine: Engine,
        store: StoreDirectory | None,
        identity: ModelIdentity,
        *,
        idle_s: float = 1800.0,
    ) -> None:
        self._engine = engine
        self._store = store
        self._identity = identity
        self._idle_s = idle_s
        self._open: dict[str, Session] = {}
        self._opening: dict[str, asyncio.Lock] = {}

    @property
    def open_sessions(self) -> dict[str, Session]:
        """By workspace name."""
        return self._open

    @contextlib.asynccontextmanager
    async def using(self, name: str, caller: Caller) -> AsyncGenerator[Session]:
        """The session of a workspace, which stays open meanwhile.

        Raises:
            StoreError: its workspace cannot be opened.
        """
        async with self._opening.setdefault(name, asyncio.Lock()):
            session = self._open.get(name)
            if session is None:
                session = self._open[name] = await self._open_session(name, caller)
            session.users += 1
        try:
            yield session
        finally:
            session.users -= 1
            session.last_used_s = time.monotonic()

    def heard(self, name: str, thread: str) -> None:
        """The client of a thread heard its newest answer to the end."""
        session = self._open.get(name)
        if session is not None:
            session.unheard.pop(thread, None)

    async def _open_session(self, name: str, caller: Caller) -> Session:
        workspace, restored = await open_workspace(
            name, self._engine, self._store, self._identity
        )
        session = Session(caller, workspace, Acknowledgement(workspace, self._engine))
        session.transcript.recall(restored.notes, workspace)
        if restored.blocks:
            _log.info("session %s is back with %d blocks", caller.session, restored.blocks)
        else:
            note = {"kind": "session", "session": caller.session, "source": caller.source}
            workspace.journal.append(Commit(note=note))
        return session

    async def maintain(self) -> None:
        """Acknowledge what became durable, and close idle sessions, until cancelled."""
        looked_for_idle_s = time.monotonic()
        while True:
            await asyncio.sleep(_ACKNOWLEDGE_EVERY_S)
            try:
                for session in list(self._open.values()):
                    behind = session.workspace.registered_blocks > session.acknowledgement.blocks
                    if session.workspace.is_durable and behind:
                        await session.acknowledgement.look()
                if time.monotonic() - looked_for_idle_s > _LOOK_FOR_IDLE_EVERY_S:
                    looked_for_idle_s = time.monotonic()
                    await self._close_idle()
            except KvwsError as error:
                _log.warning("sessions cannot be looked after: %s", error)

    async def _close_idle(self) -> None:
        now_s = time.monotonic()
        for name, session in list(self._open.items()):
            idle = session.users == 0 and now_s - session.last_used_s > self._idle_s
            if idle and session.workspace.is_durable:
                async with self._opening[name]:
                    if session.users == 0:
                        await self._close(name, session)

    async def _close(self, name: str, session: Session) -> None:
        """Let a session leave memory, if all of it is on disk."""
        if not await session.acknowledgement.complete():
            return
        await session.workspace.journal.close()
        await self._engine.drop_workspace(name)
        del self._open[name]
        _log.info("session %s left memory; it is on disk", session.caller.session)

    async def drain(self, progress: Callable[[int], None]) -> bool:
        """Wait until everything is durable, for as long as the disk takes blocks.

        Args:
            progress: told how many blocks are not durable yet.

        Returns:
            False when the disk stopped taking them.
        """
        saved = True
        durable = [s for s in self._open.values() if s.workspace.is_durable]
        for session in durable:
            unsaved = [await self._engine.unsaved_blocks(s.workspace.name) for s in durable]
            progress(sum(unsaved))
            saved = await session.acknowledgement.complete() and saved
            await session.workspace.journal.close()
        if durable and saved:
            progress(0)
        return saved
