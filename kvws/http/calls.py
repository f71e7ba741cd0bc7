"""A model call from its bytes to the end of its answer.

    length → slot → body → read → identify → share → admit → headers → answer

An error before the headers is raised, and becomes a plain reply; later ones are told inside the
stream. The call is cancelled, and its generator closed, as soon as the client goes away.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Protocol

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from kvws.chat.answer import AnswerEvent, Finished
from kvws.chat.call import ModelCall
from kvws.errors import BadRequest, EngineError, KvwsError, Overloaded
from kvws.http.admission import Admission
from kvws.http.chat_completions import is_aside
from kvws.http.dialect import Dialect
from kvws.http.guard import REQUEST_ID, SALT, STARTED_S
from kvws.http.incoming import Incoming
from kvws.http.json_body import decode_json
from kvws.http.metrics import FrontMetrics
from kvws.http.options import FrontOptions
from kvws.http.reading_memory import ReadingMemory
from kvws.http.replies import fault_text, internal_error, json_reply
from kvws.http.security import Headers, header_map
from kvws.http.sse import EventStream, Patience
from kvws.http.watching import while_connected
from kvws.serving.service import Admitted, ModelService
from kvws.session.caller import Caller

Identify = Callable[[Headers, object, ModelCall], Caller]
"""Says who is calling; raises BadRequest where an id is no id."""

_LARGE_BODY_BYTES = 256 << 10
_FAREWELL_S = 1.0
_log = logging.getLogger("kvws.http")


@dataclass(frozen=True)
class FinishedCall:
    """A call that was answered to its end.

    Attributes:
        dialect: its name.
        started_at_s: seconds since 1970.
    """

    caller: Caller
    salt: str
    dialect: str
    call: ModelCall
    events: Sequence[AnswerEvent]
    started_at_s: float
    duration_ms: float


class Listener(Protocol):
    """Is told of every call that was answered to its end, after the client has its answer."""

    async def __call__(self, finished: FinishedCall, /) -> None: ...


class ModelCalls:
    """Answers model calls over HTTP."""

    def __init__(
        self,
        service: ModelService,
        identify: Identify,
        options: FrontOptions,
        admission: Admission,
        metrics: FrontMetrics,
        listener: Listener | None,
    ) -> None:
        self._service = service
        self._identify = identify
        self._options = options
        self._admission = admission
        self._metrics = metrics
        self._listener = listener
        self._memory = ReadingMemory()

    async def answer(self, dialect: Dialect, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises:
        KvwsError: nothing was sent yet, and nothing will be.
        ClientDisconnect: the client left.
        """
        exchange = _Exchange(dialect, scope, receive, send, self._options)
        try:
            await while_connected(exchange.incoming, self._answer(exchange))
        except ClientDisconnect:
            self._metrics.aborted(dialect.name)
            raise
        except asyncio.CancelledError:
            if not exchange.stream.has_begun:
                raise
            farewell = Overloaded("the server is stopping", hint="try again")
            with suppress(TimeoutError):
                async with asyncio.timeout(_FAREWELL_S):
                    await exchange.stream.fail(farewell)

    async def count_tokens(
        self, dialect: Dialect, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Raises as `answer`."""
        exchange = _Exchange(dialect, scope, receive, send, self._options)
        await while_connected(exchange.incoming, self._count_tokens(exchange))

    async def _answer(self, exchange: _Exchange) -> None:
        async with self._admission.slot():
            call, caller = await self._read(exchange)
            self._metrics.dropped(call.dropped)
            with self._admission.share((exchange.salt, caller.session)):
                admitted = await self._service.admit(call, caller, salt=exchange.salt)
                answering = _Answering(exchange, self._metrics, keep=self._listener is not None)
                if call.stream:
                    await answering.stream(admitted, call)
                else:
                    await answering.whole(admitted, call)
        if self._listener is not None and answering.is_finished:
            await self._tell(exchange, caller, call, answering.events)

    async def _count_tokens(self, exchange: _Exchange) -> None:
        async with self._admission.slot():
            call, caller = await self._read(exchange)
            with self._admission.share((exchange.salt, caller.session)):
                count = await self._service.count_tokens(call)
        await exchange.reply({"input_tokens": count})

    async def _read(self, exchange: _Exchange) -> tuple[ModelCall, Caller]:
        """What is asked, and by whom. Large bodies are read in a thread, beside the event loop.

        Raises:
            BadRequest: it is no JSON, or no call, or nobody's.
        """
        body = await exchange.incoming.body()
        if len(body) <= _LARGE_BODY_BYTES:
            return self._understand(exchange, body)
        return await asyncio.to_thread(self._understand, exchange, body)

    def _understand(
        self, exchange: _Exchange, body: bytes | bytearray
    ) -> tuple[ModelCall, Caller]:
        decoded = decode_json(body)
        try:
            call = self._memory.read(
                exchange.dialect,
                decoded,
                body_bytes=len(body),
                salt=exchange.salt,
                headers=exchange.headers,
            )
            if is_aside(call, exchange.headers):
                call = replace(call, side_call=True)
            return call, self._identify(exchange.headers, decoded, call)
        except RecursionError:
            raise BadRequest(
                "the body is nested too deeply", hint="nest lists and objects less"
            ) from None

    async def _tell(
        self,
        exchange: _Exchange,
        caller: Caller,
        call: ModelCall,
        events: Sequence[AnswerEvent],
    ) -> None:
        assert self._listener is not None
        duration_s = time.perf_counter() - exchange.started_s
        finished = FinishedCall(
            caller=caller,
            salt=exchange.salt,
            dialect=exchange.dialect.name,
            call=call,
            events=events,
            started_at_s=time.time() - duration_s,
            duration_ms=1000 * duration_s,
        )
        try:
            await self._listener(finished)
        except Exception as fault:  # the client has its answer, whoever could not hear of it
            _log.error("%s %s", exchange.request_id, fault_text(fault))


class _Exchange:
    """The two sides of one request."""

    def __init__(
        self, dialect: Dialect, scope: Scope, receive: Receive, send: Send, options: FrontOptions
    ) -> None:
        self.dialect = dialect
        self.headers = header_map(scope["headers"])
        self.salt: str = scope[SALT]
        self.request_id: str = scope[REQUEST_ID]
        self.started_s: float = scope[STARTED_S]
        self.incoming = Incoming(
            receive,
            self.headers,
            max_bytes=options.body_max_bytes,
            stall_s=options.body_stall_s,
        )
        patience = Patience(
            options.ping_after_s, options.stay_alive_after_s, options.write_stall_s
        )
        self.stream = EventStream(send, patience)
        self._scope, self._receive, self._send = scope, receive, send

    async def reply(self, body: dict[str, object]) -> None:
        await json_reply(body)(self._scope, self._receive, self._send)


class _Answering:
    """One answer on its way.

    Attributes:
        events: what was said, if it is to be kept.
        is_finished: it was said to the end.
    """

    def __init__(self, exchange: _Exchange, metrics: FrontMetrics, *, keep: bool) -> None:
        self._exchange = exchange
        self._metrics = metrics
        self._keep = keep
        self._has_begun = False
        self.events: list[AnswerEvent] = []
        self.is_finished = False

    async def stream(self, admitted: Admitted, call: ModelCall) -> None:
        """Say it as it is made."""
        exchange = self._exchange
        try:
            await exchange.stream.begin(exchange.dialect.writer(call), admitted.usage)
            await exchange.stream.run(admitted.events(), self._note)
        except ClientDisconnect:
            raise
        except KvwsError as error:
            _log.error("%s %s: %s", exchange.request_id, type(error).__name__, error)
            await exchange.stream.fail(error)
        except Exception as fault:
            _log.error("%s %s", exchange.request_id, fault_text(fault))
            await exchange.stream.fail(internal_error(exchange.request_id))

    async def whole(self, admitted: Admitted, call: ModelCall) -> None:
        """Say it in one piece."""
        self._keep = True
        async with aclosing(admitted.events()) as events:
            async for event in events:
                self._note(event)
                if isinstance(event, Finished):
                    writer = self._exchange.dialect.writer(call)
                    await self._exchange.reply(dict(writer.whole(self.events)))
        if not self.is_finished:
            raise EngineError("the answer ended before it was complete")

    def _note(self, event: AnswerEvent) -> None:
        if not self._has_begun:
            self._has_begun = True
            waited_s = time.perf_counter() - self._exchange.started_s
            self._metrics.first_event(self._exchange.dialect.name, waited_s)
        if self._keep:
            self.events.append(event)
        if isinstance(event, Finished):
            self.is_finished = True
            self._metrics.answered(event.usage)
            self._exchange.incoming.let_go()
