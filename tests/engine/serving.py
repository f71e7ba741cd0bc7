"""The endpoint over a real engine, for the tests: the whole application on a socket of loopback,
and a client that reads its streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from kvws.endpoint import DIALECTS
from kvws.engine.client import SglangEngine
from kvws.engine.launch import RunningEngine
from kvws.http.app import make_app
from kvws.http.options import FrontOptions
from kvws.http.server import serve
from kvws.limits import Limits
from kvws.recall.recipe import recipe_named
from kvws.serving.assemble import assemble_service
from kvws.serving.session_service import SessionService
from kvws.session.identity import identify

SYSTEM = "You are a careful engineer who answers in short and plain sentences."
_TIMEOUT_S = 240.0


def logbook(number: int, entries: int) -> str:
    """Text for a model to read: about 30 tokens an entry, and no two entries alike."""
    return "\n".join(
        f"Entry {number}.{i}: pump {i * 7 % 11} of hall {number} was checked, its pressure is "
        f"{number * 31 + i * 17 % 97} bar and nothing leaks."
        for i in range(entries)
    )


@dataclass(frozen=True)
class Heard:
    """An answer as a client of the Messages API heard it.

    Attributes:
        prompt_tokens: of the whole prompt.
        computed_tokens: those of them that were not reused.
    """

    text: str
    stop_reason: str
    prompt_tokens: int
    computed_tokens: int
    answer_tokens: int

    @classmethod
    def of(cls, text: str, stop_reason: str, usage: Mapping[str, int]) -> Heard:
        reused = usage["cache_read_input_tokens"]
        computed = usage["input_tokens"] + usage["cache_creation_input_tokens"]
        return cls(text, stop_reason, reused + computed, computed, usage["output_tokens"])


def asking(messages: list[dict[str, Any]], max_tokens: int, **more: Any) -> dict[str, Any]:
    """The body of a greedy call of the Messages API."""
    return {
        "model": "any",
        "system": SYSTEM,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        **more,
    }


async def stream(
    client: httpx.AsyncClient, body: Mapping[str, Any], headers: Mapping[str, str]
) -> AsyncGenerator[dict[str, Any]]:
    """The events of a streamed answer. Closing the generator early is to hang up."""
    streamed = {**body, "stream": True}
    async with client.stream("POST", "/v1/messages", json=streamed, headers=headers) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                assert event["type"] != "error", event
                yield event


async def heard_streamed(
    client: httpx.AsyncClient, body: Mapping[str, Any], headers: Mapping[str, str]
) -> Heard:
    text, stop_reason, usage = "", "", dict[str, int]()
    async with aclosing(stream(client, body, headers)) as events:
        async for event in events:
            match event:
                case {"type": "content_block_delta", "delta": {"text": more}}:
                    text += more
                case {"type": "message_delta", "delta": delta, "usage": usage}:
                    stop_reason = delta["stop_reason"]
                case _:
                    pass
    return Heard.of(text, stop_reason, usage)


async def heard_whole(
    client: httpx.AsyncClient, body: Mapping[str, Any], headers: Mapping[str, str]
) -> Heard:
    reply = await client.post("/v1/messages", json=dict(body), headers=dict(headers))
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    text = "".join(block["text"] for block in answer["content"])
    return Heard.of(text, answer["stop_reason"], answer["usage"])


@dataclass
class Conversation:
    """One thread of a session, from the side of its client.

    Attributes:
        respelled: what this client adds to the answers that it repeats.
    """

    client: httpx.AsyncClient
    session: str
    thread: str = "main"
    respelled: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @property
    def headers(self) -> dict[str, str]:
        return {"x-kvws-workspace": self.session, "x-kvws-thread": self.thread}

    async def say(self, text: str, max_tokens: int) -> Heard:
        """One turn, streamed, at temperature 0; it becomes part of the history."""
        self.messages.append({"role": "user", "content": text})
        heard = await heard_streamed(self.client, asking(self.messages, max_tokens), self.headers)
        self.messages.append({"role": "assistant", "content": heard.text + self.respelled})
        return heard

    async def steps(self) -> list[dict[str, Any]]:
        """Reports of the session's latest steps."""
        reply = await self.client.get(f"/v1/kvws/sessions/{self.session}")
        return reply.json()["latest_steps"]


@dataclass(frozen=True)
class Front:
    """A running endpoint."""

    client: httpx.AsyncClient
    engine: SglangEngine
    service: SessionService

    def conversation(self, session: str, thread: str = "main") -> Conversation:
        return Conversation(self.client, session, thread)


@asynccontextmanager
async def serving(running: RunningEngine, model: Path, limits: Limits) -> AsyncGenerator[Front]:
    """The endpoint, in the engine's loop. Its books are checked when it stops, and its sessions
    leave the engine."""
    service = assemble_service(
        running.engine,
        limits,
        recipe_named("mean-k"),
        answer_format=running.answer_format,
        model_path=model,
        name="smollm2",
        window_tokens=100_000,
        store=None,
        identity=running.identity,
    )
    options = FrontOptions()
    stop = asyncio.Event()
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    app = make_app(service, DIALECTS, identify, options)
    server = asyncio.create_task(serve(app, options, 0, ready=ready.set_result, stop=stop))
    async with service.running():
        async with httpx.AsyncClient(base_url=await ready, timeout=_TIMEOUT_S) as client:
            yield Front(client, running.engine, service)
        stop.set()
        await server
    for session in service.open_sessions.values():
        session.workspace.check_integrity()
        assert session.users == 0
    (stats,) = await running.engine.stats()
    assert stats["open_steps"] == stats["staged_pages_now"] == 0
    await running.engine.check_integrity()
    for name in service.open_sessions:
        await running.engine.drop_workspace(name)
