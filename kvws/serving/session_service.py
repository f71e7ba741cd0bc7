"""Model calls answered from workspaces: implements `kvws.serving.service.ModelService`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from kvws.blocks.key import BLOCK_TOKENS
from kvws.chat.call import ModelCall
from kvws.errors import PromptTooLong
from kvws.serving.placing import Placed
from kvws.serving.sessions import Asker, Session, Sessions
from kvws.serving.turn import Model, Turn
from kvws.session.caller import Caller

_log = logging.getLogger("kvws.serving")


class SessionService:
    """Answers calls, each in the session of its caller."""

    def __init__(
        self, name: str, window_tokens: int, *, model: Model, sessions: Sessions
    ) -> None:
        """
        Args:
            name: of the model, as clients see it.
            window_tokens: longest prompt and answer together.
        """
        self._name = name
        self._window_tokens = window_tokens
        self._model = model
        self._sessions = sessions

    @property
    def model(self) -> str:
        return self._name

    @property
    def window_tokens(self) -> int:
        return self._window_tokens

    @property
    def open_sessions(self) -> Mapping[str, Session]:
        """By workspace name."""
        return self._sessions.open_sessions

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Look after sessions meanwhile."""
        maintaining = asyncio.create_task(self._sessions.maintain())
        try:
            yield
        finally:
            maintaining.cancel()
            await asyncio.wait([maintaining])

    async def drain(self, progress: Callable[[int], None]) -> bool:
        """As `Sessions.drain`."""
        return await self._sessions.drain(progress)

    async def admit(self, call: ModelCall, caller: Caller, *, salt: str) -> Turn:
        prepared = self._model.format.prepare(call)
        for phrase in (*call.dropped, *prepared.dropped):
            _log.info("session %s: left out: %s", caller.session, phrase)
        asker = Asker(caller, salt)
        thread = f"aside-{uuid.uuid4().hex}" if call.side_call else caller.thread
        async with self._sessions.using(asker) as session:
            placed = await self._model.placer.place(
                call,
                prepared,
                session.transcript,
                session.workspace,
                session.workspace.thread(caller.thread),
            )
        return Turn(
            call,
            prepared,
            asker,
            thread,
            placed,
            self._answer_tokens(call, placed),
            model=self._model,
            sessions=self._sessions,
        )

    def _answer_tokens(self, call: ModelCall, placed: Placed) -> int:
        """Longest answer that the window leaves room for.

        Raises:
            PromptTooLong: none.
        """
        room_tokens = self._window_tokens - placed.prompt_tokens
        if room_tokens < 1:
            raise PromptTooLong(placed.prompt_tokens, self._window_tokens)
        return min(call.max_tokens or room_tokens, room_tokens)

    async def count_tokens(self, call: ModelCall) -> int:
        return await self._model.placer.count(call, self._model.format.prepare(call))

    async def inspect(self, *, salt: str) -> dict[str, Any]:
        opened = self._sessions.open_sessions.values()
        ranks = await self._model.engine.stats()
        return {
            "model": self._name,
            "window_tokens": self._window_tokens,
            "totals": {
                "sessions": len(opened),
                "in_use": sum(session.users > 0 for session in opened),
                "blocks": sum(session.workspace.registered_blocks for session in opened),
                "durable_blocks": sum(session.acknowledgement.blocks for session in opened),
                "steps": sum(session.steps for session in opened),
            },
            "sessions": [_summary(each) for each in opened if each.asker.salt == salt],
            "ranks": {str(rank): figures for rank, figures in enumerate(ranks)},
        }

    async def inspect_session(self, session: str, *, salt: str) -> dict[str, Any] | None:
        opened = self._sessions.open_sessions.values()
        named = [s for s in opened if s.asker.salt == salt and s.name == session]
        found = max(named, key=lambda each: each.last_used_s, default=None)
        if found is None:
            return None
        threads = found.workspace.threads.values()
        return {
            **_summary(found),
            "threads": {
                thread.name: {
                    "tokens": BLOCK_TOKENS * len(thread.line),
                    "view_blocks": len(thread.view),
                }
                for thread in threads
            },
            "latest_steps": [
                {
                    **{
                        field.name: getattr(report, field.name)
                        for field in dataclasses.fields(report)
                        if field.name not in ("decisions", "ms")
                    },
                    "ms": dataclasses.asdict(report.ms),
                }
                for report in found.reports
            ],
        }


def _summary(session: Session) -> dict[str, Any]:
    return {
        "session": session.name,
        "named_by": session.caller.source,
        "blocks": session.workspace.registered_blocks,
        "durable_blocks": session.acknowledgement.blocks,
        "steps": session.steps,
        "in_use": session.users,
        "idle_s": round(time.monotonic() - session.last_used_s, 1),
    }
