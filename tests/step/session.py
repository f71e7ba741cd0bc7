"""A harness that talks to a workspace, and checks after every step that nothing is amiss."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvws.engine.protocol import Chunk
from kvws.limits import Limits
from kvws.observe.step_report import StepReport
from kvws.session.workspace import Workspace
from kvws.step import StepRequest, run_step
from tests.step.simulated_engine import SimulatedEngine

LIMITS = Limits(
    budget_tokens=256, reserve_tokens=128, sink_tokens=32, recent_tokens=64, query_tokens=64
)


def text(topic: int, blocks: float, rng: random.Random) -> list[int]:
    """That many blocks of tokens about a topic; no two of them alike."""
    return [1000 * topic + rng.randrange(1000) for _ in range(int(32 * blocks))]


@dataclass
class Reply:
    """What a caller saw of a step."""

    chunks: list[Chunk]
    report: StepReport

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]


@dataclass
class Session:
    """One workspace on one engine, with a random source for texts."""

    engine: SimulatedEngine
    workspace: Workspace = field(default_factory=lambda: Workspace("w"))
    limits: Limits = LIMITS
    rng: random.Random = field(default_factory=lambda: random.Random(5))

    @classmethod
    def start(cls, **engine: Any) -> Session:
        return cls(SimulatedEngine(context_tokens=LIMITS.context_tokens, **engine))

    def text(self, topic: int, blocks: float) -> list[int]:
        return text(topic, blocks, self.rng)

    async def ask(
        self, prompt: Sequence[int], *, thread: str = "main", max_new_tokens: int = 3, **more: Any
    ) -> Reply:
        """One step to its end."""
        request = StepRequest(thread, prompt, max_new_tokens, **more)
        chunks: list[Chunk] = []
        report: StepReport | None = None
        async for output in run_step(request, self.workspace, self.engine, self.limits):
            if isinstance(output, StepReport):
                report = output
            else:
                chunks.append(output)
        assert report is not None
        assert chunks[-1].finish_reason is not None
        return Reply(chunks, report)

    async def check(self, *, bits: bool = True) -> None:
        """Nobody asks: everything adds up. `bits`: read every block as well."""
        await self.engine.settle()
        self.workspace.check_integrity()
        self.engine.check_idle()
        if bits:
            self.engine.check_blocks(self.workspace.name)
        existing = {n for n in range(self.workspace.block_count) if self.workspace.exists(n)}
        assert set(self.engine.resident(self.workspace.name)) <= existing, "bytes without a block"

    async def ask_and_check(self, prompt: Sequence[int], **more: Any) -> Reply:
        reply = await self.ask(prompt, **more)
        await self.check()
        return reply


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an asynchronous test in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run
