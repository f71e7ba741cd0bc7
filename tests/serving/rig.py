"""A service over the simulated engine that says what a test tells it to say."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvws.chat.answer import AnswerEvent, Finished, Text
from kvws.chat.call import ModelCall
from kvws.chat.format import AnswerFormat, AnswerPart, Ended
from kvws.chat.message import Message
from kvws.engine.protocol import Chunk, GenerateRequest
from kvws.limits import Limits
from kvws.recall.recipe import recipe_named
from kvws.serving.assemble import assemble_service
from kvws.serving.session_service import SessionService
from kvws.session.caller import Caller
from kvws.session.workspace import Workspace
from kvws.store.directory import StoreDirectory
from kvws.store.identity import ModelIdentity
from tests.step.simulated_engine import SimulatedEngine

LIMITS = Limits(
    budget_tokens=1024, reserve_tokens=512, sink_tokens=32, recent_tokens=256, query_tokens=128
)
IDENTITY = ModelIdentity(
    model="simulated",
    weights="0" * 32,
    rotary="simulated",
    dtype="float32",
    layers=2,
    kv_heads=1,
    head_dim=8,
    ranks=1,
    block_tokens=32,
)


class Words:
    """The model's tokens, to and from text."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.end_of_turn: int = self._tokenizer.token_to_id("<|im_end|>")

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


@dataclass(frozen=True)
class PlainCall:
    """Implements `PreparedCall` for a call that asks for nothing in particular."""

    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    template_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    dropped: Sequence[str] = ()


class PlainFormat:
    """Implements `AnswerFormat` for a model without tools and reasoning."""

    def __init__(self, words: Words) -> None:
        self._words = words

    def prepare(self, call: ModelCall) -> PlainCall:
        return PlainCall()

    async def events(
        self, prepared: PlainCall, chunks: AsyncGenerator[Chunk, None], *, opening: str = ""
    ) -> AsyncGenerator[AnswerPart, None]:
        async with aclosing(chunks):
            async for chunk in chunks:
                ids = list(chunk.token_ids)
                if isinstance(chunk.matched_stop, int):
                    ids = ids[:-1]
                if ids:
                    yield Text(self._words.decode(ids))
                if chunk.finish_reason is not None:
                    yield Ended("length" if chunk.finish_reason == "length" else "stop")
                    return


class Script:
    """What the model says, token by token, whichever of an engine's requests asks for it.

    The requests of one step begin at the same token: a probe whose answer is not kept says
    nothing. The next step goes on behind what the one before handed over.
    """

    def __init__(self, engine: SimulatedEngine, end: int) -> None:
        self.tokens: list[int] = []
        self.forever: int | None = None
        self._end = end
        self._step = ""
        self._begin = self._handed_over = 0
        self._spoken: dict[str, int] = {}
        self._generate = engine.generate
        engine.speak = self._next
        engine.stop_tokens = frozenset({end})
        engine.generate = self._watched

    def play(self, tokens: Sequence[int]) -> None:
        """Say this next."""
        self.tokens = list(tokens)
        self._begin = self._handed_over = 0

    @property
    def is_over(self) -> bool:
        return self._begin + self._handed_over >= len(self.tokens)

    def _next(self, request: GenerateRequest) -> int:
        at = self._begin + self._spoken.get(request.rid, 0)
        self._spoken[request.rid] = self._spoken.get(request.rid, 0) + 1
        if at < len(self.tokens):
            return self.tokens[at]
        return self._end if self.forever is None else self.forever

    async def _watched(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        if request.max_new_tokens:
            step = request.rid.partition(".")[0]
            if step != self._step:
                self._begin += self._handed_over
                self._step = step
            self._handed_over = 0
        async with aclosing(self._generate(request)) as chunks:
            async for chunk in chunks:
                self._handed_over += len(chunk.token_ids) if request.max_new_tokens else 0
                yield chunk


@dataclass
class Rig:
    """A service, the engine below it, and what the model says."""

    service: SessionService
    engine: SimulatedEngine
    words: Words
    script: Script

    @classmethod
    def start(
        cls,
        model: Path,
        *,
        engine: SimulatedEngine | None = None,
        answer_format: Callable[[Words], AnswerFormat] = PlainFormat,
        store: StoreDirectory | None = None,
        window_tokens: int = 1_000_000,
        limits: Limits = LIMITS,
        **more: Any,
    ) -> Rig:
        words = Words(model)
        engine = engine or SimulatedEngine(
            context_tokens=limits.context_tokens,
            device_pages=512,
            host_blocks=20_000,
            chunk_tokens=256,
            **more,
        )
        service = assemble_service(
            engine,
            limits,
            recipe_named("mean-k"),
            answer_format=answer_format(words),
            model_path=model,
            name="simulated",
            window_tokens=window_tokens,
            store=store,
            identity=IDENTITY,
        )
        return cls(service, engine, words, Script(engine, words.end_of_turn))

    def workspace(self, session: str) -> Workspace:
        """The open workspace of a session."""
        opened = self.service.open_sessions.values()
        return next(s.workspace for s in opened if s.name == session)

    async def say(
        self,
        answer: str,
        messages: Sequence[Message],
        *,
        thread: str = "main",
        session: str = "s1",
        salt: str = "",
        **call: Any,
    ) -> Heard:
        """One call whose answer is given."""
        self.script.play(self.words.encode(answer))
        return await self.ask(messages, thread=thread, session=session, salt=salt, **call)

    async def ask(
        self,
        messages: Sequence[Message],
        *,
        thread: str = "main",
        session: str = "s1",
        salt: str = "",
        **call: Any,
    ) -> Heard:
        asked = ModelCall("any", tuple(messages), **call)
        caller = Caller(session, thread, "x-session-id")
        turn = await self.service.admit(asked, caller, salt=salt)
        events = [event async for event in turn.events()]
        return Heard(events)


@dataclass(frozen=True)
class Heard:
    """An answer as a client heard it."""

    events: list[AnswerEvent]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Text))

    @property
    def finished(self) -> Finished:
        last = self.events[-1]
        assert isinstance(last, Finished)
        return last

    @property
    def message(self) -> Message:
        """What a client puts into its history."""
        return Message("assistant", self.text)

    @property
    def computed_tokens(self) -> int:
        return self.finished.usage.prompt_tokens - self.finished.usage.reused_tokens
