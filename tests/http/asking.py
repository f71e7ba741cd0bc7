"""Ways to talk to the application: as a client would, or message by message."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson
from fastapi import FastAPI

from kvws.http.anthropic import ANTHROPIC
from kvws.http.app import make_app
from kvws.http.calls import Listener
from kvws.http.chat_completions import CHAT_COMPLETIONS
from kvws.http.options import FrontOptions
from kvws.http.replies import Dialects
from kvws.http.responses import RESPONSES
from kvws.http.server import serve
from kvws.session.identity import identify
from tests.http.fake_service import FakeService

KEY = "a-key-for-tests"
DIALECTS = Dialects(ANTHROPIC, CHAT_COMPLETIONS, RESPONSES)
CALLS: dict[str, dict[str, Any]] = {
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"model": "m", "input": "hi"},
}


def app_of(
    service: FakeService, options: FrontOptions | None = None, listener: Listener | None = None
) -> FastAPI:
    return make_app(service, DIALECTS, identify, options or FrontOptions(), listener)


def client_of(app: FastAPI, **headers: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=True)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers)


def ask(app: FastAPI, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
    """One request; header names are written with underscores."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    content = body if isinstance(body, bytes) or body is None else orjson.dumps(body)

    async def request() -> httpx.Response:
        async with client_of(app) as client:
            return await client.request(method, path, content=content, headers=named)

    return asyncio.run(request())


def sse_events(text: str) -> list[tuple[str | None, Any]]:
    """(name, data) of every event; data is text where it is no JSON."""
    events: list[tuple[str | None, Any]] = []
    for block in filter(None, text.split("\n\n")):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        data = fields["data"]
        events.append((fields.get("event"), json.loads(data) if data[0] == "{" else data))
    return events


@dataclass
class Talk:
    """One request to an ASGI application whose client the test plays itself.

    Attributes:
        pieces: of the body, each with the seconds of silence before it.
        is_whole: whether the last piece is the end of the body.
        taken: how many pieces the application has taken.
        sent: what the application sent, with the loop's time.
        leave: set when the client goes away.
        on_send: awaited before something is sent, as a slow client makes a server wait.
    """

    path: str
    pieces: Sequence[tuple[float, bytes]]
    is_whole: bool = True
    headers: Sequence[tuple[bytes, bytes]] = ((b"host", b"127.0.0.1"),)
    taken: int = 0
    sent: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    on_send: Callable[[dict[str, Any]], Awaitable[None]] | None = None

    def start(self, app: FastAPI) -> asyncio.Task[None]:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": self.path,
            "raw_path": self.path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": list(self.headers),
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "state": {},
        }
        return asyncio.create_task(self._run(app, scope, list(self.pieces)))

    async def _run(
        self, app: FastAPI, scope: dict[str, Any], pieces: list[tuple[float, bytes]]
    ) -> None:
        async def receive() -> dict[str, Any]:
            if pieces:
                await asyncio.sleep(pieces[0][0])
                _, body = pieces.pop(0)
                self.taken += 1
                more_body = bool(pieces) or not self.is_whole
                return {"type": "http.request", "body": body, "more_body": more_body}
            await self.leave.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if self.on_send is not None:
                await self.on_send(message)
            self.sent.append((asyncio.get_running_loop().time(), message))

        await app(scope, receive, send)

    @property
    def status(self) -> int:
        return next((m["status"] for _, m in self.sent if "status" in m), 0)

    @property
    def text(self) -> str:
        return b"".join(m.get("body", b"") for _, m in self.sent).decode()

    def times_of(self, marker: str) -> list[float]:
        """When something with `marker` in it was sent."""
        return [at for at, m in self.sent if marker in m.get("body", b"").decode()]


@asynccontextmanager
async def serving(
    app: FastAPI, options: FrontOptions | None = None
) -> AsyncGenerator[tuple[str, int], None]:
    """The application on a real socket of this machine."""
    bound: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    task = asyncio.create_task(
        serve(app, options or FrontOptions(), 0, ready=bound.set_result, stop=stop, grace_s=1)
    )
    done, _ = await asyncio.wait({task, bound}, return_when=asyncio.FIRST_COMPLETED)
    if task in done:
        task.result()
    try:
        url = httpx.URL(bound.result())
        assert url.port is not None
        yield url.host, url.port
    finally:
        stop.set()
        await task


def raw_request(path: str, body: bytes, *extra: str, length: int | None = None) -> bytes:
    """A POST as bytes, with a content-length that may lie."""
    lines = [
        f"POST {path} HTTP/1.1",
        "host: 127.0.0.1",
        f"content-length: {len(body) if length is None else length}",
        *extra,
        "",
        "",
    ]
    return "\r\n".join(lines).encode() + body


async def until(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    deadline_s = time.monotonic() + within_s
    while True:
        if condition():
            return
        assert time.monotonic() < deadline_s, "it did not happen in time"
        await asyncio.sleep(0.001)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self._virtual_s = 0.0
        really_select = self._selector.select

        def select(timeout: float | None) -> Any:
            ready = really_select(0 if timeout is not None else 5)  # threads take real time
            assert ready or timeout is not None, "everything waits, and nothing will happen"
            if not ready and timeout:
                self._virtual_s += timeout
            return ready

        self._selector.select = select

    def time(self) -> float:
        return self._virtual_s


def in_virtual_time(work: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await work()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(run())
