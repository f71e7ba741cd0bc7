"""The server around the application: how it binds, becomes ready, and stops."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Awaitable, Callable

import pytest

from kvws.errors import ConfigError
from kvws.http.options import FrontOptions
from kvws.http.server import _bind, serve
from tests.http.asking import app_of, raw_request, until
from tests.http.fake_service import ANSWER, FakeService, saying_after

STREAM = b'{"messages": [{"role": "user", "content": "hi"}], "stream": true}'
WHOLE = b'{"messages": [{"role": "user", "content": "hi"}]}'


async def _exchange(port: int, body: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(raw_request("/v1/messages", body))
    try:
        return await reader.read()
    finally:
        writer.close()


Stop = Callable[[asyncio.Task[None], asyncio.Event], Awaitable[None]]


async def _by_event(task: asyncio.Task[None], stop: asyncio.Event) -> None:
    stop.set()
    await task


async def _by_cancelling(task: asyncio.Task[None], stop: asyncio.Event) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def replies_over_a_stop(answer_s: float, grace_s: int, stop_it: Stop) -> tuple[list[bytes], float]:
    """A streamed and a whole answer that are under way when the server is stopped, and how long
    the stop took."""
    service = FakeService()
    service.answering = lambda call: saying_after(answer_s, *ANSWER)
    replies: list[bytes] = []
    took_s = 0.0

    async def run() -> None:
        nonlocal replies, took_s
        urls: list[str] = []
        stop = asyncio.Event()
        serving = serve(
            app_of(service), FrontOptions(), 0, ready=urls.append, stop=stop, grace_s=grace_s
        )
        task = asyncio.create_task(serving)
        await until(lambda: bool(urls))
        port = int(urls[0].rpartition(":")[2])
        asking = [asyncio.create_task(_exchange(port, body)) for body in (STREAM, WHOLE)]
        await until(lambda: service.opened == 2)
        started_s = time.monotonic()
        await stop_it(task, stop)
        took_s = time.monotonic() - started_s
        replies = list(await asyncio.gather(*asking))
        with pytest.raises(OSError):
            await _exchange(port, WHOLE)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())
    assert service.opened == service.closed == 2
    return replies, took_s


@pytest.mark.parametrize("stop_it", [_by_event, _by_cancelling])
def test_answers_under_way_may_finish(stop_it: Stop) -> None:
    (streamed, whole), _ = replies_over_a_stop(0.5, 5, stop_it)
    assert b"message_stop" in streamed
    assert b" 200 " in whole and b"Hello there" in whole


@pytest.mark.parametrize("stop_it", [_by_event, _by_cancelling])
def test_answers_that_take_too_long_end_with_an_error_to_try_again_after(stop_it: Stop) -> None:
    (streamed, whole), took_s = replies_over_a_stop(60, 1, stop_it)
    assert b"event: error" in streamed and b"stopping" in streamed
    assert b"HTTP/1.1 503" in whole and b"retry-after" in whole
    assert took_s < 4


def test_the_second_cancellation_does_not_wait() -> None:
    service = FakeService()
    service.answering = lambda call: saying_after(60, *ANSWER)

    async def run() -> None:
        urls: list[str] = []
        task = asyncio.create_task(
            serve(app_of(service), FrontOptions(), 0, ready=urls.append, grace_s=60)
        )
        await until(lambda: bool(urls))
        asking = asyncio.create_task(_exchange(int(urls[0].rpartition(":")[2]), STREAM))
        await until(lambda: service.opened == 1)
        started_s = time.monotonic()
        task.cancel()
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - started_s < 5
        assert b"event: error" in await asking

    asyncio.run(run())


def test_a_taken_port_is_a_setting_to_change() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="--port"):
            asyncio.run(serve(app_of(FakeService()), FrontOptions(), port))


def test_an_address_of_another_machine_is_a_setting_to_change() -> None:
    options = FrontOptions(host="192.0.2.1", keys=("k",))
    with pytest.raises(ConfigError, match="--host"):
        asyncio.run(serve(app_of(FakeService(), options), options, 0))


def test_signals_stay_with_the_program() -> None:
    handlers: list[object] = []

    async def run() -> None:
        stop = asyncio.Event()

        def ready(url: str) -> None:
            handlers.extend(signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM))
            stop.set()

        before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
        await serve(app_of(FakeService()), FrontOptions(), 0, ready=ready, stop=stop)
        assert handlers == before

    asyncio.run(run())


def test_requests_are_answered_as_soon_as_it_is_ready() -> None:
    async def run() -> None:
        stop = asyncio.Event()
        replies: list[asyncio.Task[bytes]] = []

        def ready(url: str) -> None:
            assert url.startswith("http://127.0.0.1:")
            replies.append(asyncio.create_task(_exchange(int(url.rpartition(":")[2]), WHOLE)))
            asyncio.get_running_loop().call_later(0.5, stop.set)

        await serve(app_of(FakeService()), FrontOptions(), 0, ready=ready, stop=stop)
        assert b"HTTP/1.1 200" in await replies[0]

    asyncio.run(run())


def test_small_frames_go_out_at_once() -> None:
    """And do not wait until the client has acknowledged the ones before."""
    with _bind("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
