"""The real server in a thread of its own, over the simulated engine that speaks a script.

Real: HTTP, dialects, sessions, splicing, recall, the data plane, tool-call parsing. Scripted:
which token comes next.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers import AutoTokenizer

from kvws.chat.answer import Finished, Usage
from kvws.chat.call import ModelCall
from kvws.chat.format import AnswerFormat, AnswerPart, PreparedCall
from kvws.engine.chat_format import ChatFormat
from kvws.engine.protocol import Chunk, GenerateRequest
from kvws.harness_adapters.address import ServerAddress
from kvws.http.anthropic import ANTHROPIC
from kvws.http.app import make_app
from kvws.http.calls import FinishedCall
from kvws.http.chat_completions import CHAT_COMPLETIONS
from kvws.http.options import FrontOptions
from kvws.http.replies import Dialects
from kvws.http.responses import RESPONSES
from kvws.http.server import serve
from kvws.limits import Limits
from kvws.recall.recipe import recipe_named
from kvws.serving.assemble import assemble_service
from kvws.serving.session_service import SessionService
from kvws.session.identity import identify
from tests.e2e.scripts import Turn
from tests.serving.rig import IDENTITY
from tests.step.simulated_engine import SimulatedEngine

KEY = "e2e-key"
WINDOW_TOKENS = 1_000_000
LIMITS = Limits(
    budget_tokens=2048, reserve_tokens=1024, sink_tokens=32, recent_tokens=512, query_tokens=128
)
"""A first request of Claude Code is ten budgets long: every answer comes from a recalled view."""

_SCRIPT = "script"
_START_S = 60.0


class Speaks(Protocol):
    """A script."""

    def next_turn(self, call: ModelCall) -> Turn: ...


@dataclass(frozen=True)
class Answered:
    """A model call that was answered to its end."""

    caller: str
    thread: str
    is_aside: bool
    is_streamed: bool
    usage: Usage

    @property
    def computed_tokens(self) -> int:
        return self.usage.prompt_tokens - self.usage.reused_tokens


@dataclass
class Front:
    """A running server and what it saw.

    Attributes:
        answered: model calls, in the order in which they ended.
        replies: (method, path, status) of every request.
    """

    address: ServerAddress
    answered: list[Answered] = field(default_factory=list[Answered])
    replies: list[tuple[str, str, int]] = field(default_factory=list[tuple[str, str, int]])

    @property
    def turns(self) -> list[Answered]:
        """Model calls that belong to a conversation."""
        return [call for call in self.answered if not call.is_aside]

    @property
    def refused(self) -> list[tuple[str, str, int]]:
        return [reply for reply in self.replies if reply[2] >= 400]

    async def note(self, finished: FinishedCall) -> None:
        last = finished.events[-1]
        assert isinstance(last, Finished)
        caller, call = finished.caller, finished.call
        self.answered.append(
            Answered(caller.session, caller.thread, call.side_call, call.stream, last.usage)
        )


class ScriptedFormat:
    """A model's chat format, whose prepared calls carry what the model will say."""

    def __init__(self, real: AnswerFormat, script: Speaks, tokenizer: Any) -> None:
        self._real = real
        self._script = script
        self._tokenizer = tokenizer

    def prepare(self, call: ModelCall) -> PreparedCall:
        prepared = self._real.prepare(call)
        text = self._script.next_turn(call).generated
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        return replace(prepared, sampling={**prepared.sampling, _SCRIPT: tuple(tokens)})

    def events(
        self, prepared: PreparedCall, chunks: AsyncGenerator[Chunk, None], *, opening: str = ""
    ) -> AsyncGenerator[AnswerPart, None]:
        return self._real.events(prepared, chunks, opening=opening)


class ScriptedTongue:
    """Tells the simulated engine its next token. An answer may take several requests, and a
    request may be made twice: where the script goes on is read from the end of the prompt."""

    def __init__(self, end: int) -> None:
        self._end = end
        self._spoken: dict[str, int] = {}

    def __call__(self, request: GenerateRequest) -> int:
        script: tuple[int, ...] = request.sampling[_SCRIPT]
        at = self._spoken.get(request.rid)
        if at is None:
            at = _overlap(tuple(request.token_ids), script)
        self._spoken[request.rid] = at + 1
        return script[at] if at < len(script) else self._end


def _overlap(prompt: tuple[int, ...], script: tuple[int, ...]) -> int:
    """Tokens of the script that the prompt ends with."""
    longest = min(len(prompt), len(script))
    return next((n for n in range(longest, 0, -1) if prompt[-n:] == script[:n]), 0)


@contextmanager
def running_front(
    script: Speaks, model: Path, *, window_tokens: int = WINDOW_TOKENS
) -> Generator[Front, None, None]:
    """A server that answers by a script; its books are checked when it stops."""
    ready, faults = threading.Event(), list[BaseException]()
    front = Front(ServerAddress("", KEY, window_tokens, "simulated"))
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    def on_ready(base_url: str) -> None:
        front.address = replace(front.address, base_url=base_url)
        ready.set()

    async def run() -> None:
        engine, service = _scripted_service(script, model, window_tokens)
        options = FrontOptions(keys=(KEY,))
        app = make_app(service, DIALECTS, identify, options, listener=front.note)
        app.add_middleware(_Noting, replies=front.replies)
        async with service.running():
            await serve(app, options, 0, ready=on_ready, stop=stop)
        await engine.settle()
        for session in service.open_sessions.values():
            session.workspace.check_integrity()
        engine.check_idle()

    def work() -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(run())
        except BaseException as fault:
            faults.append(fault)
        finally:
            ready.set()
            loop.close()

    thread = threading.Thread(target=work, name="e2e-front")
    thread.start()
    try:
        assert ready.wait(_START_S), "the server does not start"
        if not faults:
            yield front
    finally:
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)
        thread.join(_START_S)
    if faults:
        raise faults[0]


DIALECTS = Dialects(anthropic=ANTHROPIC, chat_completions=CHAT_COMPLETIONS, responses=RESPONSES)


def _scripted_service(
    script: Speaks, model: Path, window_tokens: int
) -> tuple[SimulatedEngine, SessionService]:
    tokenizer: Any = AutoTokenizer.from_pretrained(str(model))
    engine = SimulatedEngine(
        context_tokens=LIMITS.context_tokens,
        device_pages=2048,
        host_blocks=50_000,
        chunk_tokens=512,
    )
    engine.speak = ScriptedTongue(tokenizer.eos_token_id)
    engine.stop_tokens = frozenset({tokenizer.eos_token_id})
    service = assemble_service(
        engine,
        LIMITS,
        recipe_named("mean-k"),
        answer_format=ScriptedFormat(ChatFormat.offline(str(model)), script, tokenizer),
        model_path=model,
        name="simulated",
        window_tokens=window_tokens,
        store=None,
        identity=IDENTITY,
    )
    return engine, service


class _Noting:
    """Notes how every request was replied to."""

    def __init__(self, app: ASGIApp, replies: list[tuple[str, str, int]]) -> None:
        self._app = app
        self._replies = replies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._replies.append((scope["method"], scope["path"], message["status"]))
            await send(message)

        await self._app(scope, receive, noted)
