"""Streams that are silent, clients that are slow, and clients that go away."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator
from itertools import pairwise
from typing import Any

import orjson
import pytest

from kvws.chat.answer import AnswerEvent, Finished, Text, ToolArguments, ToolCallBegun
from kvws.chat.call import ModelCall
from kvws.http.options import FrontOptions
from tests.http.asking import (
    CALLS,
    Talk,
    app_of,
    in_virtual_time,
    raw_request,
    serving,
    sse_events,
    until,
)
from tests.http.fake_service import ANSWER, USAGE, FakeService, saying_after

MESSAGES = "/v1/messages"


def call_of(path: str, *, stream: bool) -> bytes:
    return orjson.dumps({**CALLS[path], "stream": stream})


def talk_of(path: str, *, stream: bool, **how: Any) -> Talk:
    return Talk(path, [(0, call_of(path, stream=stream))], **how)


def marker(event: str) -> str:
    return f"event: {event}\n"


@pytest.mark.parametrize("silence_s", [300.0, 3600.0])
def test_a_long_silence_is_filled_with_pings_and_every_two_minutes_with_more(
    silence_s: float,
) -> None:
    service = FakeService()
    service.answering = lambda call: saying_after(silence_s, *ANSWER)
    talk = talk_of(MESSAGES, stream=True)

    async def run() -> None:
        await talk.start(app_of(service))

    in_virtual_time(run)
    pings = talk.times_of(marker("ping"))
    stay_alives = [t for t in talk.times_of("thinking_delta") if t < silence_s]
    assert talk.times_of("message_start") == [0.0]
    assert stay_alives == [
        120.0 * n for n in range(1, int(silence_s // 120) + 1) if 120 * n < silence_s
    ]
    assert pings[:8] == [15.0, 30.0, 45.0, 60.0, 75.0, 90.0, 105.0, 135.0]
    assert max(b - a for (a, _), (b, _) in pairwise(talk.sent)) <= 15.0
    assert talk.times_of("message_stop") == [silence_s]


@pytest.mark.parametrize("path", list(CALLS))
def test_a_silence_inside_an_answer_leaves_its_stream_well_formed(path: str) -> None:
    async def answer(call: ModelCall) -> AsyncGenerator[AnswerEvent, None]:
        for event in ANSWER:
            await asyncio.sleep(130)
            yield event

    service = FakeService()
    service.answering = answer
    talk = talk_of(path, stream=True)

    async def run() -> None:
        await talk.start(app_of(service))

    in_virtual_time(run)
    assert len(sse_events(talk.text)) > 8 * len(ANSWER)
    assert service.broken_off == 0
    if path == MESSAGES:
        open_block: int | None = None
        for name, data in sse_events(talk.text):
            match name:
                case "content_block_start":
                    assert open_block is None
                    open_block = data["index"]
                case "content_block_delta":
                    assert data["index"] == open_block
                case "content_block_stop":
                    assert data["index"] == open_block
                    open_block = None
                case _:
                    pass
        assert open_block is None


def test_events_on_time_need_no_pings() -> None:
    async def answer(call: ModelCall) -> AsyncGenerator[AnswerEvent, None]:
        for _ in range(50):
            await asyncio.sleep(14)
            yield Text("x")
        yield Finished("stop", USAGE)

    service = FakeService()
    service.answering = answer
    talk = talk_of(MESSAGES, stream=True)

    async def run() -> None:
        await talk.start(app_of(service))

    in_virtual_time(run)
    assert talk.times_of(marker("ping")) == []
    assert len(talk.times_of("text_delta")) == 50


def test_a_long_answer_in_one_piece_is_silent_until_it_is_done() -> None:
    service = FakeService()
    service.answering = lambda call: saying_after(3600, *ANSWER)
    talk = talk_of(MESSAGES, stream=False)

    async def run() -> None:
        await talk.start(app_of(service))

    in_virtual_time(run)
    assert {at for at, _ in talk.sent} == {3600.0} and talk.status == 200


def test_headers_wait_for_admission_and_for_nothing_else() -> None:
    service = FakeService()
    service.admit_s = 50.0
    service.answering = lambda call: saying_after(100, *ANSWER)
    talk = talk_of(MESSAGES, stream=True)

    async def run() -> None:
        await talk.start(app_of(service))

    in_virtual_time(run)
    assert talk.sent[0][0] == 50.0 and talk.times_of("message_start") == [50.0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("left_at_s", [0.5, 5.0, 35.0])
def test_a_client_that_leaves_stops_the_work_at_once(stream: bool, left_at_s: float) -> None:
    """At 0.5 s it waits for a slot, at 5 s it is admitted, at 35 s it is answered."""
    service = FakeService()
    service.admit_s = 20.0
    service.answering = lambda call: saying_after(100, *ANSWER)
    app = app_of(service, FrontOptions(answering_max=1))
    blocker = talk_of(MESSAGES, stream=False)
    talk = talk_of(MESSAGES, stream=stream)

    async def run() -> None:
        if left_at_s < 1:
            blocker.start(app)
            await asyncio.sleep(0)
        task = talk.start(app)
        await asyncio.sleep(left_at_s)
        talk.leave.set()
        left_s = asyncio.get_running_loop().time()
        await task
        assert asyncio.get_running_loop().time() == left_s
        blocker.leave.set()
        await asyncio.sleep(1)
        later = talk_of(MESSAGES, stream=False)
        await later.start(app)
        assert later.status == 200, "the slot came back"
        assert len(asyncio.all_tasks()) == 1

    in_virtual_time(run)
    assert service.opened == service.closed
    assert service.admits_cancelled == (1 if left_at_s <= 5 else 0)
    assert service.broken_off == (1 if left_at_s == 35 else 0)


def test_a_client_that_leaves_while_it_sends_is_let_go() -> None:
    service = FakeService()
    app = app_of(service, FrontOptions(answering_max=1, waiting_max=0))

    async def run() -> None:
        talk = Talk(MESSAGES, [(0, b'{"messages": ')], is_whole=False)
        task = talk.start(app)
        await asyncio.sleep(10)
        talk.leave.set()
        await task
        assert talk.sent == []
        later = talk_of(MESSAGES, stream=False)
        await later.start(app)
        assert later.status == 200, "the slot came back"

    in_virtual_time(run)


def test_a_slow_client_slows_its_own_answer_down() -> None:
    made = 0

    async def answer(call: ModelCall) -> AsyncGenerator[AnswerEvent, None]:
        nonlocal made
        for _ in range(1000):
            made += 1
            yield Text("x")
        yield Finished("stop", USAGE)

    service = FakeService()
    service.answering = answer

    async def run() -> None:
        reads = asyncio.Event()
        ahead: list[int] = []

        async def slow(message: dict[str, Any]) -> None:
            if b"text_delta" in message.get("body", b"") and not reads.is_set():
                await asyncio.sleep(200)
                ahead.append(made)
                reads.set()

        talk = talk_of(MESSAGES, stream=True, on_send=slow)
        await talk.start(app_of(service))
        assert ahead and ahead[0] < 200
        assert talk.text.count("text_delta") == 1000 and "message_stop" in talk.text

    in_virtual_time(run)


def test_a_client_that_never_reads_is_given_up() -> None:
    async def answer(call: ModelCall) -> AsyncGenerator[AnswerEvent, None]:
        while True:
            yield Text("x")

    service = FakeService()
    service.answering = answer

    async def run() -> None:
        async def deaf(message: dict[str, Any]) -> None:
            if b"text_delta" in message.get("body", b""):
                await asyncio.Event().wait()

        talk = talk_of(MESSAGES, stream=True, on_send=deaf)
        await talk.start(app_of(service))
        assert asyncio.get_running_loop().time() == FrontOptions().write_stall_s
        assert (service.opened, service.broken_off) == (1, 1)

    in_virtual_time(run)


@pytest.mark.parametrize(("silence_s", "status"), [(59, 200), (61, 408)])
def test_a_body_may_come_slowly_but_not_stall(silence_s: float, status: int) -> None:
    body = call_of(MESSAGES, stream=False)
    talk = Talk(MESSAGES, [(0, body[:5]), (silence_s, body[5:9]), (silence_s, body[9:])])

    async def run() -> None:
        await talk.start(app_of(FakeService()))

    in_virtual_time(run)
    assert talk.status == status
    headers = dict(talk.sent[0][1]["headers"])
    assert (headers.get(b"connection") == b"close") is (status == 408)


def test_a_large_body_waits_outside_until_there_is_a_slot() -> None:
    service = FakeService()
    service.admit_s = 100.0
    app = app_of(service, FrontOptions(answering_max=1))
    body = call_of(MESSAGES, stream=False)
    taken = 0

    async def run() -> None:
        nonlocal taken
        first = talk_of(MESSAGES, stream=False)
        first.start(app)
        await asyncio.sleep(1)
        pieces = [(0.0, b" " * 65536) for _ in range(100)]
        second = Talk(MESSAGES, [*pieces, (0, body)])
        task = second.start(app)
        await asyncio.sleep(50)
        taken = second.taken
        await task
        assert second.status == 200 and second.taken == 101

    in_virtual_time(run)
    assert taken < 10


# On real sockets of this machine.


async def _reply(host: str, port: int, request: bytes, more: bytes = b"") -> bytes:
    """What the server says until it closes the connection or says no more for a moment."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(request)
    answer = b""
    try:
        writer.write(more)
        async with asyncio.timeout(2):
            while chunk := await reader.read(65536):
                answer += chunk
    except TimeoutError:
        pass
    finally:
        writer.close()
    return answer


def status_of(reply: bytes) -> int:
    found = re.match(rb"HTTP/1\.1 (\d+)", reply)
    assert found, reply
    return int(found[1])


def test_bodies_that_are_not_what_their_headers_say() -> None:
    options = FrontOptions(body_max_bytes=10_000, body_stall_s=0.2)
    app = app_of(FakeService(), options)
    body = call_of(MESSAGES, stream=False)
    chunked = f"POST {MESSAGES} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    close = "connection: close"
    piece = b"%x\r\n%b\r\n" % (4000, b"x" * 4000)

    async def run() -> None:
        async with serving(app, options) as (host, port):

            async def status(request: bytes) -> int:
                return status_of(await _reply(host, port, request))

            cases = [
                (raw_request(MESSAGES, body, close), 200),
                (raw_request(MESSAGES, body, close, length=len(body) + 5), 408),
                (raw_request(MESSAGES, body, close, length=10_001), 413),
                (raw_request(MESSAGES, body, close, length=10**19), 413),
                (raw_request(MESSAGES, body, close, length=3), 400),
                (raw_request(MESSAGES, body, close, length=-3), 400),
                (chunked.encode() + piece * 3, 413),
                (chunked.encode() + piece * 300, 413),
                (chunked.encode() + piece, 408),
                (chunked.encode() + b"fff", 408),
                (chunked.encode() + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body), 200),
                (b"GET / HTTP/1.1\r\nhost: evil.example\r\n\r\n", 403),
                (b"garbage\r\n\r\n", 400),
            ]
            statuses = await asyncio.gather(*(status(request) for request, _ in cases))
            assert statuses == [expected for _, expected in cases]

    asyncio.run(run())


def test_a_client_is_told_to_go_on_only_if_its_body_is_wanted() -> None:
    options = FrontOptions(keys=("k",))
    app = app_of(FakeService(), options)
    body = call_of(MESSAGES, stream=False)

    async def run() -> None:
        async with serving(app, options) as (host, port):
            for key, first in (("k", b"HTTP/1.1 100"), ("wrong", b"HTTP/1.1 401")):
                head = raw_request(
                    MESSAGES,
                    b"",
                    f"x-api-key: {key}",
                    "expect: 100-continue",
                    "connection: close",
                    length=len(body),
                )
                reader, writer = await asyncio.open_connection(host, port)
                writer.write(head)
                assert (await reader.read(12)) == first
                writer.write(body)
                rest = await reader.read()
                assert (b"HTTP/1.1 200" in rest) is (key == "k")
                writer.close()

    asyncio.run(run())


def test_a_connection_can_be_used_again_after_a_refusal() -> None:
    options = FrontOptions(keys=("k",))
    app = app_of(FakeService(), options)
    body = call_of(MESSAGES, stream=False) + b" " * 200_000

    async def run() -> None:
        async with serving(app, options) as (host, port):
            refused = raw_request(MESSAGES, body, "x-api-key: wrong")
            answered = raw_request(MESSAGES, body, "x-api-key: k", "connection: close")
            reply = await _reply(host, port, refused, answered)
            assert re.findall(rb"HTTP/1\.1 (\d+)", reply) == [b"401", b"200"]

    asyncio.run(run())


def test_a_client_that_does_not_read_does_not_keep_others_waiting() -> None:
    made = 0

    async def answer(call: ModelCall) -> AsyncGenerator[AnswerEvent, None]:
        nonlocal made
        if call.messages[-1].content == "hi":
            for event in ANSWER:
                yield event
            return
        while True:
            made += 1
            yield Text("x" * 10_000)

    service = FakeService()
    service.answering = answer
    flood = orjson.dumps({"messages": [{"role": "user", "content": "flood"}], "stream": True})

    async def run() -> None:
        async with serving(app_of(service)) as (host, port):
            reader, writer = await asyncio.open_connection(host, port, limit=1024)
            writer.write(raw_request(MESSAGES, flood))
            while True:
                before = made
                await asyncio.sleep(0.2)
                if made == before:
                    break
            assert 0 < made < 10_000
            request = raw_request(MESSAGES, call_of(MESSAGES, stream=True), "connection: close")
            started_s = time.perf_counter()
            reply = await _reply(host, port, request)
            assert b"message_stop" in reply and time.perf_counter() - started_s < 1
            writer.close()
            await until(lambda: service.broken_off == 1)
            del reader

    asyncio.run(run())


DISCONNECTS = 1000
STEPS: tuple[AnswerEvent, ...] = (*ANSWER[:-1], Text("a"), Text("b"), ToolCallBegun(1, "c2", "n"))
STEPS = (*STEPS, ToolArguments(1, "{}"), Text("c"))


def test_a_thousand_clients_that_leave_at_every_event_leave_nothing_behind() -> None:
    """Each answer stops after some events, its client leaves when it has seen them all."""
    closed_at: dict[str, float] = {}
    reached: dict[str, asyncio.Event] = {}

    async def answer(call: ModelCall) -> AsyncGenerator[AnswerEvent, None]:
        name, count = call.messages[-1].content.split()
        try:
            for event in STEPS[: int(count)]:
                yield event
            reached[name].set()
            await asyncio.Event().wait()
        finally:
            closed_at[name] = time.perf_counter()

    service = FakeService()
    service.answering = answer
    app = app_of(service, FrontOptions(answering_max=8))
    latencies_s: list[float] = []

    async def leave(host: str, port: int, number: int) -> None:
        name, stream = f"n{number}", number % 4 != 0
        count = number % (len(STEPS) + 1)
        content = f"{name} {count}"
        body = {"messages": [{"role": "user", "content": content}], "stream": stream}
        reached[name] = asyncio.Event()
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(raw_request(MESSAGES, orjson.dumps(body), f"x-session-id: {name}"))
        if stream:
            await reader.readuntil(b"message_start")
        await reached[name].wait()
        writer.transport.abort()
        left_at = time.perf_counter()
        await until(lambda: name in closed_at)
        latencies_s.append(closed_at[name] - left_at)

    async def run() -> None:
        async with serving(app) as (host, port):
            baseline = len(asyncio.all_tasks())
            for first in range(0, DISCONNECTS, 8):
                await asyncio.gather(*(leave(host, port, first + n) for n in range(8)))
            await until(lambda: len(asyncio.all_tasks()) <= baseline)
            metrics = await _reply(
                host,
                port,
                b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
            )
            assert b"kvws_answering 0.0" in metrics and b"kvws_waiting 0.0" in metrics
            assert b'kvws_aborts_total{dialect="anthropic"} %.1f' % DISCONNECTS in metrics

    asyncio.run(run())
    assert len(latencies_s) == DISCONNECTS
    assert service.opened == service.closed == service.broken_off == DISCONNECTS
    p99_ms = 1000 * sorted(latencies_s)[int(0.99 * DISCONNECTS)]
    print(f"from a disconnect to the closed generator: p99 {p99_ms:.1f} ms")
    assert p99_ms < 100
    assert max(latencies_s) < 0.5


def test_a_client_that_leaves_after_the_answer_breaks_nothing_off() -> None:
    async def answer(call: ModelCall) -> AsyncGenerator[AnswerEvent, None]:
        yield Text("Hello")
        yield Finished("stop", USAGE)
        await asyncio.sleep(0.1)

    service = FakeService()
    service.answering = answer

    async def run() -> None:
        async with serving(app_of(service)) as (host, port):
            for stream in (True, False):
                reader, writer = await asyncio.open_connection(host, port)
                writer.write(raw_request(MESSAGES, call_of(MESSAGES, stream=stream)))
                await reader.readuntil(b"message_stop" if stream else b"end_turn")
                writer.transport.abort()
            await asyncio.sleep(0.3)

    asyncio.run(run())
    assert (service.opened, service.closed, service.broken_off) == (2, 2, 0)


def test_all_dialects_are_pinged_in_ways_that_mean_nothing() -> None:
    """The text of an answer is the same with and without silence."""
    for path in CALLS:
        texts: list[str] = []
        for silence_s in (0, 500):
            service = FakeService()
            service.answering = lambda call, s=silence_s: saying_after(s, *ANSWER)
            talk = talk_of(path, stream=True)

            async def run(talk: Talk = talk, service: FakeService = service) -> None:
                await talk.start(app_of(service))

            in_virtual_time(run)
            said = re.findall(r'"(?:delta|text|content|partial_json)":"([^"]+)"', talk.text)
            texts.append("".join(said))
        assert texts[0] == texts[1] != ""
