"""A model service that says what a test wants, and counts what it leaves open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from kvws.chat.answer import (
    AnswerEvent,
    Finished,
    Reasoning,
    Text,
    ToolArguments,
    ToolCallBegun,
    Usage,
)
from kvws.chat.call import ModelCall
from kvws.errors import KvwsError
from kvws.session.caller import Caller

USAGE = Usage(prompt_tokens=40, reused_tokens=32, stored_tokens=5, answer_tokens=7)
ANSWER: tuple[AnswerEvent, ...] = (
    Reasoning("hm"),
    Text("Hello"),
    Text(" there"),
    ToolCallBegun(0, "call_1", "look"),
    ToolArguments(0, '{"path":'),
    ToolArguments(0, ' "a"}'),
    Finished("tool_calls", USAGE),
)

Answering = Callable[[ModelCall], AsyncGenerator[AnswerEvent, None]]


async def saying(*events: AnswerEvent) -> AsyncGenerator[AnswerEvent, None]:
    for event in events:
        yield event


async def saying_after(seconds: float, *events: AnswerEvent) -> AsyncGenerator[AnswerEvent, None]:
    await asyncio.sleep(seconds)
    for event in events:
        yield event


async def failing_after(
    error: Exception, *events: AnswerEvent
) -> AsyncGenerator[AnswerEvent, None]:
    for event in events:
        yield event
    raise error


class FakeService:
    """Implements `ModelService`.

    Attributes:
        answering: makes the answer to a call; the default says ANSWER.
        admitting: raised by `admit`.
        admit_s: how long `admit` takes.
        admitted: every call that was admitted, with its caller and salt.
        opened: generators that began; `closed` of them ended, `broken_off` before their end.
        admits_cancelled: how often `admit` was cancelled.
    """

    model = "fake/model"
    window_tokens = 4096

    def __init__(self) -> None:
        self.answering: Answering = lambda call: saying(*ANSWER)
        self.admitting: BaseException | None = None
        self.admit_s = 0.0
        self.admitted: list[tuple[ModelCall, Caller, str]] = []
        self.opened = self.closed = self.broken_off = 0
        self.admits_cancelled = 0
        self.last_closed_s = 0.0
        self.state: dict[str, Any] = {"tiers": {"host": {"used_bytes": 5}}, "sessions": ["a"]}

    async def admit(self, call: ModelCall, caller: Caller, *, salt: str) -> FakeAdmitted:
        try:
            await asyncio.sleep(self.admit_s)
        except asyncio.CancelledError:
            self.admits_cancelled += 1
            raise
        if self.admitting is not None:
            raise self.admitting
        self.admitted.append((call, caller, salt))
        return FakeAdmitted(self, call)

    async def count_tokens(self, call: ModelCall) -> int:
        await asyncio.sleep(self.admit_s)
        if isinstance(self.admitting, KvwsError):
            raise self.admitting
        return sum(len(message.content.split()) for message in call.messages)

    async def inspect(self, *, salt: str) -> dict[str, Any]:
        return self.state

    async def inspect_session(self, session: str, *, salt: str) -> dict[str, Any] | None:
        return {"session": session, "salt": salt} if session == "known" else None


class FakeAdmitted:
    """Implements `Admitted`."""

    usage = Usage(prompt_tokens=40, reused_tokens=32)

    def __init__(self, service: FakeService, call: ModelCall) -> None:
        self._service = service
        self._call = call

    async def events(self) -> AsyncGenerator[AnswerEvent, None]:
        service = self._service
        service.opened += 1
        is_whole = False
        try:
            async for event in service.answering(self._call):
                yield event
            is_whole = True
        finally:
            service.closed += 1
            service.broken_off += not is_whole
            service.last_closed_s = asyncio.get_running_loop().time()
