"""Open sessions: each a workspace, its transcript, and who is using it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field

from kvws.engine.protocol import Chunk, Engine
from kvws.errors import KvwsError
from kvws.observe.step_report import StepReport
from kvws.recall.selector import Selector
from kvws.serving.named_locks import NamedLocks
from kvws.serving.uninterrupted import uninterrupted
from kvws.session.caller import Caller
from kvws.session.commit import Commit
from kvws.session.durable import Acknowledgement, open_workspace
from kvws.session.identity import workspace_name
from kvws.session.transcript import Transcript
from kvws.session.workspace import Workspace
from kvws.store.directory import StoreDirectory
from kvws.store.identity import ModelIdentity

_KEPT_REPORTS = 50
_ACKNOWLEDGE_EVERY_S = 0.5
_LOOK_FOR_IDLE_EVERY_S = 30.0
_DRAIN_POLL_S = 0.05
_DRAIN_PATIENCE_S = 20.0
"""A disk that takes no block of any session for so long is taken to be in trouble."""

_log = logging.getLogger("kvws.serving")


@dataclass(frozen=True)
class Asker:
    """Who asks.

    Attributes:
        salt: of the API key. Sessions of different salts share nothing, whatever they are called.
    """

    caller: Caller
    salt: str

    @property
    def workspace(self) -> str:
        """The name of the session's workspace."""
        return workspace_name(self.caller, self.salt)


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
        asker: who opened it.
        unheard: by thread, the newest answer, if its client went away.
        reports: of the latest steps.
        steps: so many since it was opened.
        users: requests that are using it now.
        last_used_s: on the monotonic clock.
    """

    asker: Asker
    workspace: Workspace
    acknowledgement: Acknowledgement
    transcript: Transcript = field(default_factory=Transcript)
    unheard: dict[str, Unheard] = field(default_factory=dict[str, Unheard])
    reports: deque[StepReport] = field(default_factory=lambda: deque(maxlen=_KEPT_REPORTS))
    steps: int = 0
    users: int = 0
    last_used_s: float = field(default_factory=time.monotonic)
    _turns: NamedLocks = field(default_factory=NamedLocks)

    def turn(self, thread: str) -> contextlib.AbstractAsyncContextManager[None]:
        """Held while a call of that thread is placed, answered and learned."""
        return self._turns.held(thread)

    @property
    def caller(self) -> Caller:
        return self.asker.caller

    @property
    def name(self) -> str:
        """As its client calls it."""
        return self.caller.session


class Sessions:
    """Opens sessions at their first call, and lets idle ones leave memory.

    Those with a disk below them come back with their next call. The others are lost when they
    leave, so of them the most recently used stay.
    """

    def __init__(
        self,
        engine: Engine,
        store: StoreDirectory | None,
        identity: ModelIdentity,
        selector: Callable[[], Selector],
        *,
        idle_s: float = 1800.0,
        kept_without_disk: int = 64,
    ) -> None:
        """
        Args:
            selector: makes what chooses the blocks of a session's views.
            idle_s: without a request for so long, a session is idle.
            kept_without_disk: sessions without a disk that stay, idle or not.
        """
        self._engine = engine
        self._store = store
        self._identity = identity
        self._selector = selector
        self._idle_s = idle_s
        self._kept_without_disk = kept_without_disk
        self._open: dict[str, Session] = {}
        self._doors = NamedLocks()

    @property
    def open_sessions(self) -> dict[str, Session]:
        """By workspace name."""
        return self._open

    @contextlib.asynccontextmanager
    async def using(self, asker: Asker) -> AsyncGenerator[Session]:
        """The session of who asks, which stays open meanwhile. It is opened to the end, and stays
        open for the next call, also where who asks leaves before that.

        Raises:
            StoreError: its workspace cannot be opened.
        """
        name = asker.workspace
        async with self._doors.held(name):
            if name not in self._open:
                await uninterrupted(self._open_session(name, asker))
            session = self._open[name]
            session.users += 1
        try:
            yield session
        finally:
            session.users -= 1
            session.last_used_s = time.monotonic()

    def heard(self, asker: Asker, thread: str) -> None:
        """The client of a thread heard its newest answer to the end."""
        session = self._open.get(asker.workspace)
        if session is not None:
            session.unheard.pop(thread, None)

    async def _open_session(self, name: str, asker: Asker) -> None:
        workspace, restored = await open_workspace(
            name, self._engine, self._store, self._identity
        )
        workspace.selector = self._selector()
        session = Session(asker, workspace, Acknowledgement(workspace, self._engine))
        session.transcript.recall(restored.notes, workspace)
        if restored.blocks:
            _log.info("session %s is back with %d blocks", session.name, restored.blocks)
        else:
            source = asker.caller.source
            note = {"kind": "session", "session": session.name, "source": source}
            workspace.journal.append(Commit(note=note))
        self._open[name] = session

    async def maintain(self) -> None:
        """Acknowledge what became durable, and let idle sessions go, until cancelled."""
        look_for_idle_at_s = time.monotonic() + _LOOK_FOR_IDLE_EVERY_S
        while True:
            await asyncio.sleep(_ACKNOWLEDGE_EVERY_S)
            for session in list(self._open.values()):
                await _looked_after(session, self._acknowledge(session))
            if time.monotonic() >= look_for_idle_at_s:
                await self.close_idle()
                look_for_idle_at_s = time.monotonic() + _LOOK_FOR_IDLE_EVERY_S

    async def _acknowledge(self, session: Session) -> None:
        behind = session.workspace.registered_blocks > session.acknowledgement.blocks
        if session.workspace.is_durable and behind:
            await session.acknowledgement.look()

    async def close_idle(self) -> None:
        """Let idle sessions leave memory, the longest idle first: all those that are on disk, and
        of the others as many as there are too many."""
        idle_since_s = time.monotonic() - self._idle_s
        oldest_first = sorted(self._open.items(), key=lambda item: item[1].last_used_s)
        in_memory_only = sum(not session.workspace.is_durable for _, session in oldest_first)
        for name, session in oldest_first:
            if session.users or session.last_used_s > idle_since_s:
                continue
            if session.workspace.is_durable:
                await _looked_after(session, self._close(name, session))
            elif in_memory_only > self._kept_without_disk:
                in_memory_only -= 1
                await _looked_after(session, self._close(name, session))

    async def _close(self, name: str, session: Session) -> None:
        """Let a session leave memory, unless it is in use again or not all of it is on disk yet.
        Whoever asks meanwhile waits at the door, so nothing here waits for a disk in trouble."""
        async with self._doors.held(name):
            if session.users:
                return
            is_durable = session.workspace.is_durable
            if is_durable and await session.acknowledgement.look() != 0:
                return
            await self._engine.drop_workspace(name)
            del self._open[name]
            await session.workspace.journal.close()
        if is_durable:
            _log.info("session %s left memory; it is on disk", session.name)
        else:
            _log.warning(
                "session %s was idle and is gone: %d sessions are kept without a disk tier",
                session.name,
                self._kept_without_disk,
            )

    async def drain(
        self, progress: Callable[[int], None], *, patience_s: float = _DRAIN_PATIENCE_S
    ) -> bool:
        """Wait until everything is durable, for as long as the disk takes blocks.

        Args:
            progress: told how many blocks are not durable yet, whenever that changes.
            patience_s: how long the disk may take none, of any session.

        Returns:
            False when the disk stopped taking them.
        """
        durable = [s for s in self._open.values() if s.workspace.is_durable]
        waiting, told, deadline_s = durable, -1, time.monotonic() + patience_s
        while waiting and time.monotonic() < deadline_s:
            unsaved = [await self._unsaved_blocks(session) for session in waiting]
            still = [s for s, blocks in zip(waiting, unsaved, strict=True) if blocks != 0]
            count = sum(max(0, blocks) for blocks in unsaved)
            if len(still) < len(waiting) or 0 <= count < told or told < 0:
                deadline_s = time.monotonic() + patience_s
            if count != told:
                progress(count)
            waiting, told = still, count
            if waiting:
                await asyncio.sleep(_DRAIN_POLL_S)
        for session in durable:
            await _looked_after(session, session.workspace.journal.close())
        return not waiting

    async def _unsaved_blocks(self, session: Session) -> int:
        """As `Acknowledgement.look`; -1 also when the engine cannot say."""
        try:
            return await session.acknowledgement.look()
        except KvwsError as error:
            _log.warning("session %s cannot be saved now: %s", session.name, error)
            return -1


async def _looked_after(session: Session, work: Awaitable[None]) -> None:
    """Do something for one session whose failure must not end what is done for the others."""
    try:
        await work
    except KvwsError as error:
        _log.warning("session %s cannot be looked after: %s", session.name, error)
    except Exception as fault:
        _log.error("session %s cannot be looked after: %r", session.name, fault)
