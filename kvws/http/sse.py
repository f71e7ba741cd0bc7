"""An answer as server-sent events, on time even while there is nothing to say.

The answer's generator runs in a task of its own and fills a short queue. What sends empties it,
so a slow client slows its own answer down and nothing else, and silence can be told from work:

    nothing sent for `ping_after_s`                     ping
    only pings sent for `stay_alive_after_s`            stay_alive
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass

import orjson
from starlette.requests import ClientDisconnect
from starlette.types import Send

from kvws.chat.answer import AnswerEvent, Finished, Usage
from kvws.errors import EngineError, KvwsError
from kvws.http.dialect import AnswerWriter, SseEvent
from kvws.http.watching import ended

MEDIA_TYPE = "text/event-stream"

_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
)
_QUEUE_MAX_EVENTS = 64


def frame(event: SseEvent) -> bytes:
    """One event as it goes over the wire."""
    name = b"" if event.event is None else b"event: %b\n" % event.event.encode()
    if isinstance(event.data, str):
        lines = [b"data: %b\n" % line for line in event.data.encode().split(b"\n")]
    else:
        lines = [b"data: %b\n" % orjson.dumps(event.data)]
    return b"".join((name, *lines, b"\n"))


@dataclass(frozen=True)
class _End:
    """The generator has ended: by itself, or with a failure."""

    failure: Exception | None


_Item = AnswerEvent | _End


@dataclass(frozen=True)
class Patience:
    """How long a stream may be silent, and a client deaf; see `FrontOptions`."""

    ping_after_s: float
    stay_alive_after_s: float
    write_stall_s: float


class EventStream:
    """The response of one streamed answer: `begin`, then `run`; `fail` at any time after `begin`.

    Attributes:
        has_begun: the headers are sent, so an error can only be told inside the stream.
    """

    def __init__(self, send: Send, patience: Patience) -> None:
        self._send = send
        self._patience = patience
        self._writer: AnswerWriter | None = None
        self._is_over = False

    @property
    def has_begun(self) -> bool:
        return self._writer is not None

    async def begin(self, writer: AnswerWriter, usage: Usage) -> None:
        """Send the headers and what can be said before the model speaks."""
        self._writer = writer
        await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._write(writer.begin(usage))

    async def run(
        self,
        events: AsyncGenerator[AnswerEvent, None],
        on_event: Callable[[AnswerEvent], None],
    ) -> None:
        """Send the answer to its end. The generator is run to its end too, or closed.

        Args:
            on_event: called with each event before it is sent.

        Raises:
            KvwsError: the answer failed.
            ClientDisconnect: the client does not read it.
        """
        queue: asyncio.Queue[_Item] = asyncio.Queue(_QUEUE_MAX_EVENTS)
        source = asyncio.create_task(_fill(queue, events))
        try:
            await self._send_all(queue, on_event)
            if failure := await source:
                raise failure
        finally:
            await ended(source)

    async def _send_all(
        self, queue: asyncio.Queue[_Item], on_event: Callable[[AnswerEvent], None]
    ) -> None:
        writer = self._begun_writer()
        now = asyncio.get_running_loop().time
        last_sent = last_meant = now()
        while True:
            ping_at = last_sent + self._patience.ping_after_s
            stay_alive_at = last_meant + self._patience.stay_alive_after_s
            try:
                async with asyncio.timeout_at(min(ping_at, stay_alive_at)):
                    items = await _waiting_items(queue)
            except TimeoutError:
                if stay_alive_at <= ping_at:
                    await self._write(writer.stay_alive())
                    last_meant = now()
                else:
                    await self._write(writer.ping())
                last_sent = now()
                continue
            frames: list[SseEvent] = []
            for item in items:
                if isinstance(item, _End):
                    await self._write(frames)
                    raise item.failure or EngineError("the answer ended before it was complete")
                on_event(item)
                frames += writer.event(item)
                if isinstance(item, Finished):
                    await self._write(frames, is_last=True)
                    return
            await self._write(frames)
            last_sent = last_meant = now()

    async def fail(self, error: KvwsError) -> None:
        """Tell the client that the answer failed, and end the stream."""
        await self._write(self._begun_writer().error(error), is_last=True)

    async def _write(self, events: Iterable[SseEvent], *, is_last: bool = False) -> None:
        """Raises:
        ClientDisconnect: the client left what was sent before unread for too long.
        """
        body = b"".join(map(frame, events))
        if self._is_over or not (body or is_last):
            return
        self._is_over = is_last
        try:
            async with asyncio.timeout(self._patience.write_stall_s):
                await self._send(
                    {"type": "http.response.body", "body": body, "more_body": not is_last}
                )
        except TimeoutError:
            self._is_over = True
            raise ClientDisconnect from None

    def _begun_writer(self) -> AnswerWriter:
        assert self._writer is not None, "the stream has not begun"
        return self._writer


async def _fill(
    queue: asyncio.Queue[_Item], events: AsyncGenerator[AnswerEvent, None]
) -> Exception | None:
    """Run a generator to its end, also where it works on after its last event; why it failed."""
    is_finished = False
    failure: Exception | None = None
    try:
        async with aclosing(events):
            async for event in events:
                assert not is_finished, "an event after the last one"
                is_finished = isinstance(event, Finished)
                await queue.put(event)
    except Exception as error:
        failure = error
    await queue.put(_End(failure))
    return failure


async def _waiting_items(queue: asyncio.Queue[_Item]) -> list[_Item]:
    """Wait for one item, and take all that are there."""
    items = [await queue.get()]
    while not queue.empty():
        items.append(queue.get_nowait())
    return items
