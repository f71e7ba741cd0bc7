"""What the front costs per step in a session of a million tokens, without any engine.

Everything a step does between the client's bytes and the engine: read the body, find what is
known of it, render what is new, align it with the log, read what new blocks say, choose among all,
plan the view, and write an answer's frames.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from rich.table import Table

from kvws.blocks.key import BLOCK_TOKENS
from kvws.chat.answer import Finished, Text, Usage
from kvws.chat.call import ModelCall
from kvws.chat.message import Message
from kvws.chat.render import ChatRenderer
from kvws.chat.spelling import spelling_of
from kvws.choosing import choose, first_look, read_new_blocks
from kvws.http.anthropic import ANTHROPIC
from kvws.http.json_body import decode_json
from kvws.http.reading_memory import ReadingMemory
from kvws.http.sse import frame
from kvws.limits import Limits
from kvws.looking import competing
from kvws.recall.plan import plan_view
from kvws.recall.recipe import FUSED
from kvws.recall.regions import Regions
from kvws.recall.selector import Asked, Selector
from kvws.serving.garbage import freeze_what_is_loaded
from kvws.serving.placing import Placer
from kvws.serving.prompts import PromptBuilder
from kvws.session.identity import identify
from kvws.session.transcript import Given, Landmarks, Transcript, place_in
from kvws.session.workspace import Workspace

PARTS = (
    "read the body",
    "place the prompt",
    "align",
    "read new blocks",
    "choose and plan",
    "write the answer",
)

_WORDS_A_MESSAGE = 800
_TEXT = (
    "the of and to in is that it was for on are as with his they at be this from have or by one "
    "had not but what all were when we there can an your which their said if do will each about "
    "how up out them then she many some so these would other into has more two like him see "
    "time could no make than first been its who now people my made over did down only way find "
    "use file line value return import class error test index token block page store read write "
    "path "
)
_WORDS = tuple(_TEXT.split())
_ANSWER_FRAMES = 200
_HEADERS = {"x-claude-code-session-id": "front", "x-app": "cli"}


@dataclass
class FrontCost:
    """What each step took, by part.

    Attributes:
        tokens: of the session.
        messages: of the session.
        body_bytes: of a request.
        ms: on the clock.
        cpu_ms: of this process, whatever else the machine does meanwhile.
        loop_lag_ms: how late the event loop was, sampled every few milliseconds meanwhile.
    """

    tokens: int
    messages: int
    body_bytes: int
    ms: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    cpu_ms: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    loop_lag_ms: list[float] = field(default_factory=list[float])

    @contextmanager
    def measure(self, part: str) -> Generator[None]:
        begin, cpu_begin = time.perf_counter(), time.process_time()
        yield
        self.ms[part].append(1e3 * (time.perf_counter() - begin))
        self.cpu_ms[part].append(1e3 * (time.process_time() - cpu_begin))


def measure_front(model: Path, limits: Limits, tokens: int, steps: int) -> FrontCost:
    """Grow a session to that many tokens, then time so many steps of it.

    Args:
        model: folder of the tokenizer and its chat template.
        tokens: of the session, about.
    """
    return asyncio.run(_measure(model, limits, tokens, steps))


async def _measure(model: Path, limits: Limits, tokens: int, steps: int) -> FrontCost:
    session = _Session(model, limits)
    freeze_what_is_loaded()  # as the endpoint does
    body = session.grown(tokens)
    cost = FrontCost(session.tokens, len(session.history), len(body))
    watching = asyncio.create_task(_watch_loop(cost.loop_lag_ms))
    for _ in range(steps):
        await session.step(cost)
    watching.cancel()
    session.executor.shutdown()
    return cost


async def _watch_loop(lag_ms: list[float]) -> None:
    interval_s = 0.002
    while True:
        due = time.perf_counter() + interval_s
        await asyncio.sleep(interval_s)
        lag_ms.append(1e3 * (time.perf_counter() - due))


class _Session:
    """One long session of a made-up agent: it reads files, and says so."""

    def __init__(self, model: Path, limits: Limits) -> None:
        self.executor = ThreadPoolExecutor(1)
        self.history: list[dict[str, Any]] = []
        self._limits = limits
        self._memory = ReadingMemory()
        self._renderer = ChatRenderer(model)
        self._builder = PromptBuilder(self._renderer)
        self._placer = Placer(self._builder, self.executor)
        self._transcript = Transcript()
        self._workspace = Workspace("front")
        self._workspace.selector = Selector(FUSED, spelling_of(self._renderer))
        self._thread = self._workspace.thread("main")
        self._rng = random.Random(7)  # noqa: S311 - the same words in every run
        schema = {"type": "object", "properties": {"path": {"type": "string"}}}
        self._tools = [
            {"name": f"Tool{n}", "description": self._text(150), "input_schema": schema}
            for n in range(20)
        ]

    @property
    def tokens(self) -> int:
        return BLOCK_TOKENS * len(self._thread.line)

    def _text(self, words: int) -> str:
        return " ".join(self._rng.choices(_WORDS, k=words))

    def _body(self) -> bytes:
        system = [{"type": "text", "text": "You are an agent. " + self.history[0]["content"][:99]}]
        metadata = {"user_id": '{"session_id": "front"}'}
        return orjson.dumps(
            {
                "model": "kvws",
                "max_tokens": 32000,
                "system": system,
                "tools": self._tools,
                "metadata": metadata,
                "messages": self.history,
                "stream": True,
            }
        )

    def _says(self, number: int) -> None:
        """The agent's turn, and what its tool answered."""
        use = {"type": "tool_use", "id": f"t{number}", "name": "Tool1", "input": {"path": "a.py"}}
        result = {
            "type": "tool_result",
            "tool_use_id": f"t{number}",
            "content": self._text(_WORDS_A_MESSAGE),
        }
        said = {"type": "text", "text": f"Reading file {number}."}
        self.history.append({"role": "assistant", "content": [said, use]})
        self.history.append({"role": "user", "content": [result]})

    def grown(self, tokens: int) -> bytes:
        """A request of a session of that many tokens whose prompt is known but for its end."""
        self.history = [{"role": "user", "content": self._text(200)}]
        sample = _Session._message_tokens(self._renderer, self._text(_WORDS_A_MESSAGE))
        for number in range(max(1, tokens // sample)):
            self._says(number)
        body = self._body()
        call = self._read(body)
        self._learn(call, self._renderer.tokens(call.messages, call.tools))
        return body

    @staticmethod
    def _message_tokens(renderer: ChatRenderer, text: str) -> int:
        return len(renderer.tokens([Message("tool", text)])) + 60

    def _read(self, body: bytes) -> ModelCall:
        """As the endpoint reads it."""
        decoded = decode_json(body)
        call = self._memory.read(
            ANTHROPIC, decoded, body_bytes=len(body), salt="", headers=_HEADERS
        )
        identify(_HEADERS, decoded, call)
        return call

    def _learn(self, call: ModelCall, tokens: list[int]) -> None:
        """The whole prompt becomes blocks, as if it had been computed."""
        numbers = tuple(self._workspace.allocate((), tokens))
        view = numbers[: self._limits.budget_blocks]
        self._workspace.record(self._thread, numbers, view, numbers)
        place = place_in(numbers, 0, tokens, len(tokens), Landmarks(), {}, {})
        digests = self._builder.digests("main", call.messages)
        self._transcript.learn(digests[-1], place, None)
        self._workspace.selector.catch_up(self._workspace, len(numbers))

    async def step(self, cost: FrontCost) -> None:
        """One step: the agent says something, its tool answers, the client asks."""
        self._says(len(self.history))
        body = self._body()
        with cost.measure("read the body"):
            call = await asyncio.to_thread(self._read, body)
        with cost.measure("place the prompt"):
            placed = await self._placer.place(
                call, _Plain(), self._transcript, self._workspace, self._thread
            )
        with cost.measure("align"):
            aligned = self._workspace.align(placed.tokens, placed.behind)
        line = aligned.line
        # What the ranks would say.
        noise = np.random.default_rng(7).random((2, self._workspace.block_count), dtype=np.float32)
        by_rank_signal = dict(zip(FUSED.rank_signals, noise, strict=True))
        selector, budget_blocks = self._workspace.selector, self._limits.budget_blocks
        with cost.measure("read new blocks"):
            await read_new_blocks(self._workspace)
        with cost.measure("choose and plan"):
            regions = Regions.of_prompt(
                line,
                placed.spans,
                sink_blocks=self._limits.sink_blocks,
                recent_blocks=self._limits.recent_blocks,
                budget_blocks=budget_blocks,
            )
            held = frozenset(self._thread.view)
            question = aligned.pending[-self._limits.query_tokens :]  # the rest is ingested ahead
            own = selector.content_rows(question)
            candidates = competing(regions, line, question, self._workspace, "main")
            asked = Asked(line, question, own, regions, candidates, held, budget_blocks)
            known = await first_look(self._workspace, asked)
            choice = await choose(self._workspace, asked, {**known, **by_rank_signal})
            plan_view(
                current=self._thread.view,
                regions=regions,
                chosen=choice.chosen,
                budget_blocks=budget_blocks,
                room_blocks=budget_blocks,
            )
        with cost.measure("write the answer"):
            writer = ANTHROPIC.writer(call)
            frames = [*writer.begin(Usage(placed.prompt_tokens))]
            for _ in range(_ANSWER_FRAMES):
                frames += writer.event(Text("word "))
            frames += writer.event(Finished("stop", Usage(placed.prompt_tokens)))
            b"".join(map(frame, frames))
        # The prompt becomes blocks, and the client's next request continues it.
        numbers = tuple(self._workspace.allocate(line, aligned.pending))
        self._workspace.record(self._thread, line + numbers, self._thread.view, numbers)
        tells = (placed.landmarks, placed.told, placed.tools)
        begin, whole = len(placed.behind), placed.tokens
        place = place_in(self._thread.line, begin, whole, placed.end, *tells)
        said = Message("assistant", "unheard")
        self._transcript.learn(placed.asked, place, Given(said, place))


@dataclass(frozen=True)
class _Plain:
    sampling: dict[str, Any] = field(default_factory=dict[str, Any])
    template_options: dict[str, Any] = field(default_factory=dict[str, Any])
    dropped: tuple[str, ...] = ()


def front_table(cost: FrontCost) -> Table:
    """Percentiles of every part, and of the whole."""
    size = f"{cost.tokens:,} tokens, {cost.messages:,} messages, {cost.body_bytes:,} bytes"
    table = Table(title=size)
    for column in ("part", "p50 ms", "p99 ms", "p50 CPU ms"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for part in PARTS:
        _add_row(table, part, cost.ms[part], cost.cpu_ms[part])
    _add_row(table, "all", _totals(cost.ms), _totals(cost.cpu_ms))
    _add_row(table, "event loop lag", cost.loop_lag_ms, [])
    return table


def _totals(by_part: dict[str, list[float]]) -> list[float]:
    """All parts of each step."""
    return [sum(step) for step in zip(*(by_part[part] for part in PARTS), strict=True)]


def _add_row(table: Table, name: str, ms: list[float], cpu_ms: list[float]) -> None:
    p99 = statistics.quantiles(ms, n=100)[98] if len(ms) > 1 else ms[0]
    cpu = f"{statistics.median(cpu_ms):.1f}" if cpu_ms else ""
    table.add_row(name, f"{statistics.median(ms):.1f}", f"{p99:.1f}", cpu)
