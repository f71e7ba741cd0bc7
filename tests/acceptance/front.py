"""The real server in a thread of its own, in front of a simulated engine that can be looked into.

Like `tests.e2e.front`, and in the hands of the test: what the model says, how fast, and what the
engine computed for it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from transformers import AutoTokenizer

from kvws.chat.answer import Finished
from kvws.chat.call import ModelCall
from kvws.engine.chat_format import ChatFormat
from kvws.engine.protocol import Chunk, GenerateRequest
from kvws.http.app import make_app
from kvws.http.calls import FinishedCall
from kvws.http.options import FrontOptions
from kvws.http.recorder import Recorder
from kvws.http.server import serve
from kvws.limits import Limits
from kvws.recall.recipe import recipe_named
from kvws.serving.assemble import assemble_service
from kvws.serving.session_service import SessionService
from kvws.session.identity import identify
from kvws.session.workspace import Workspace
from tests.e2e.front import DIALECTS, KEY, Answered, ScriptedFormat, ScriptedTongue
from tests.e2e.scripts import Turn
from tests.serving.rig import IDENTITY
from tests.step.simulated_engine import SimulatedEngine

LIMITS = Limits(
    budget_tokens=1024, reserve_tokens=512, sink_tokens=32, recent_tokens=256, query_tokens=128
)
OPTIONS = FrontOptions(keys=(KEY,))
_START_S = 60.0
_TELLING_TOKENS = 16
"""So many tokens of a long answer tell where in it they stand."""


@dataclass(frozen=True)
class Saying(Turn):
    """An answer as the model writes it, letter by letter."""

    written: str = ""

    @property
    def generated(self) -> str:
        return self.written


@dataclass
class Script:
    """Says what it was given, whatever is asked; or what `by_call` makes of the call."""

    saying: str = "Yes."
    by_call: Callable[[ModelCall], str] | None = None

    def next_turn(self, call: ModelCall) -> Turn:
        return Saying(written=self.by_call(call) if self.by_call else self.saying)


class WatchedEngine(SimulatedEngine):
    """Counts what it computes, and speaks as slowly as it is told to.

    Attributes:
        prefilled_tokens: prompt tokens computed so far, probes included.
        pause_s: before each chunk.
        ended_s: by request, when it was over, on the monotonic clock.
        most_at_once: requests that ran at the same time.
        generated_tokens: handed over so far, probes that speak included.
        is_held: an answer waits for the event that `hold` was given.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.prefilled_tokens = 0
        self.pause_s = 0.0
        self.ended_s: dict[str, float] = {}
        self.most_at_once = 0
        self.generated_tokens = 0
        self.is_held = False
        self._hold_after = 0
        self._go_on: threading.Event | None = None

    def hold(self, after_chunks: int, go_on: threading.Event | None) -> None:
        """From its `after_chunks`-th chunk on, every answer waits for an event."""
        self._hold_after, self._go_on = after_chunks, go_on

    @property
    def running_requests(self) -> int:
        return len(self._running)

    def _compute(self, run: Any, end: int, *, tapped: bool = True) -> None:
        self.prefilled_tokens += end - run.computed if tapped else 0
        self.most_at_once = max(self.most_at_once, self.running_requests)
        super()._compute(run, end, tapped=tapped)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        try:
            async with aclosing(super().generate(request)) as chunks:
                said = 0
                async for chunk in chunks:
                    await asyncio.sleep(self.pause_s if request.max_new_tokens else 0)
                    while request.max_new_tokens and self._is_holding(said):
                        self.is_held = True
                        await asyncio.sleep(0.005)
                    said += 1
                    self.generated_tokens += len(chunk.token_ids)
                    yield chunk
        finally:
            self.is_held = False
            self.ended_s[request.rid] = time.monotonic()

    def _is_holding(self, said_chunks: int) -> bool:
        held = self._go_on is not None and not self._go_on.is_set()
        return held and said_chunks >= self._hold_after


@dataclass
class Front:
    """A running server, and what stands behind it.

    Attributes:
        answered: model calls, in the order in which they ended.
    """

    base_url: str
    engine: WatchedEngine
    service: SessionService
    script: Script
    tokenizer: Any
    loop: asyncio.AbstractEventLoop
    answered: list[Answered] = field(default_factory=list[Answered])

    async def note(self, finished: FinishedCall) -> None:
        last = finished.events[-1]
        assert isinstance(last, Finished)
        caller, call = finished.caller, finished.call
        self.answered.append(
            Answered(caller.session, caller.thread, call.side_call, call.stream, last.usage)
        )

    def answered_of(self, session: str, thread: str = "main") -> list[Answered]:
        return [each for each in self.answered if (each.caller, each.thread) == (session, thread)]

    def told(self, calls: Callable[[], list[Answered]], count: int) -> list[Answered]:
        """What `calls` finds, once it finds `count` of them: the server counts a call after its
        client has the answer."""
        deadline_s = time.monotonic() + _START_S
        while len(found := calls()) < count:
            assert time.monotonic() < deadline_s, f"{len(found)} of {count} answered"
            time.sleep(0.001)
        return found

    def client(self, **headers: str) -> httpx.Client:
        return httpx.Client(
            base_url=self.base_url,
            headers={"authorization": f"Bearer {KEY}", **headers},
            timeout=60.0,
            trust_env=False,
        )

    def post(
        self, path: str, body: Mapping[str, Any], session: str = "s1", **headers: str
    ) -> httpx.Response:
        """One call of a session, over a connection of its own."""
        named = {"x-session-id": session} if session else {}
        with self.client(**named, **headers) as client:
            return client.post(path, json=dict(body))

    def workspace(self, session: str = "s1") -> Workspace:
        opened = self.service.open_sessions.values()
        return next(each.workspace for each in opened if each.caller.session == session)

    def tokens(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def text(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=False)

    def view_text(self, session: str = "s1", thread: str = "main") -> str:
        """What a thread's newest view shows."""
        workspace = self.workspace(session)
        view = workspace.thread(thread).view
        return self.text([t for block in view for t in workspace.block_tokens(block)])


class LongTongue(ScriptedTongue):
    """Also knows where an answer goes on behind a view that no longer shows its beginning."""

    def __call__(self, request: GenerateRequest) -> int:
        if request.rid not in self._spoken:
            script: tuple[int, ...] = request.sampling["script"]
            newest = tuple(request.token_ids[-_TELLING_TOKENS:])
            ends = range(_TELLING_TOKENS, len(script) + 1)
            places = [end for end in ends if script[end - _TELLING_TOKENS : end] == newest]
            if len(places) == 1:
                self._spoken[request.rid] = places[0]
        return super().__call__(request)


@contextmanager
def running_front(
    model: Path,
    script: Script | None = None,
    *,
    limits: Limits = LIMITS,
    options: FrontOptions = OPTIONS,
    window_tokens: int = 1_000_000,
    reasoning_parser: str = "auto",
    recorder: Callable[[], Recorder] | None = None,
) -> Generator[Front, None, None]:
    """A server that answers by a script; its books are checked when it stops."""
    script = script or Script()
    ready, stop, loop = threading.Event(), asyncio.Event(), asyncio.new_event_loop()
    faults: list[BaseException] = []
    tokenizer: Any = AutoTokenizer.from_pretrained(str(model))
    engine = _engine(limits, tokenizer.eos_token_id)
    real_format = ChatFormat.offline(str(model), reasoning_parser=reasoning_parser)
    service = assemble_service(
        engine,
        limits,
        recipe_named("mean-k"),
        answer_format=ScriptedFormat(real_format, script, tokenizer),
        model_path=model,
        name="simulated",
        window_tokens=window_tokens,
        store=None,
        identity=IDENTITY,
    )
    front = Front("", engine, service, script, tokenizer, loop)

    def on_ready(base_url: str) -> None:
        front.base_url = base_url
        ready.set()

    async def run() -> None:
        records = recorder() if recorder is not None else None

        async def listen(finished: FinishedCall) -> None:
            await front.note(finished)
            if records is not None:
                await _record(records, finished)

        app = make_app(service, DIALECTS, identify, options, listener=listen)
        async with service.running():
            await serve(app, options, 0, ready=on_ready, stop=stop)
        await engine.settle()
        if records is not None:
            await records.close()
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

    thread = threading.Thread(target=work, name="acceptance-front")
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


def _engine(limits: Limits, end: int) -> WatchedEngine:
    engine = WatchedEngine(
        context_tokens=limits.context_tokens,
        device_pages=2048,
        host_blocks=50_000,
        chunk_tokens=512,
    )
    engine.speak = LongTongue(end)
    engine.stop_tokens = frozenset({end})
    return engine


async def _record(recorder: Recorder, finished: FinishedCall) -> None:
    await recorder.record(
        finished.caller,
        finished.call,
        finished.events,
        dialect=finished.dialect,
        started_at_s=finished.started_at_s,
        duration_ms=finished.duration_ms,
    )
