"""Sixteen sessions on one engine: each is answered as if it were alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvws.engine.launch import RunningEngine
from kvws.engine.settings import EngineSettings
from kvws.limits import Limits
from kvws.session.workspace import Workspace
from tests.engine.asking import Answer, ask_workspace
from tests.engine.timed import timed_engine
from tests.engine.tiny import tiny_model

SESSIONS = 16
STEPS = 2
LIMITS = Limits(256, 256, 32, 64, 64, probe_tokens=64)


@pytest.fixture(scope="module")
def tiny(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """An engine that takes a few milliseconds for a step."""
    settings = EngineSettings(
        model=tiny_model(smollm2, tmp_path_factory.mktemp("model")),
        context_tokens=LIMITS.context_tokens,
        host_bytes=64 << 20,
    )
    with timed_engine(settings) as engine:
        yield engine


class Sessions:
    """Workspaces of random text, three times the budget, each with the same text in every set."""

    def __init__(self, running: RunningEngine, kind: str) -> None:
        self.running = running
        self.workspaces = [Workspace(f"{kind}-{number}") for number in range(SESSIONS)]

    def prompt(self, session: int, step: int) -> list[int]:
        rng = random.Random(session)
        return [rng.randrange(1000, 40_000) for _ in range(3 * LIMITS.budget_tokens + 50 * step)]

    async def step(self, session: int, step: int) -> Answer:
        return await ask_workspace(
            self.running.engine,
            self.workspaces[session],
            self.prompt(session, step),
            LIMITS,
            count=6,
        )

    async def steps(self, session: int) -> list[Answer]:
        return [await self.step(session, step) for step in range(STEPS)]

    def one_after_the_other(self) -> list[list[Answer]]:
        return [self.running.run(self.steps(session)) for session in range(SESSIONS)]

    def at_once(self) -> Sequence[list[Answer]]:
        async def all_of_them() -> list[list[Answer]]:
            return await asyncio.gather(*map(self.steps, range(SESSIONS)))

        return self.running.run(all_of_them())

    def leave(self) -> None:
        for workspace in self.workspaces:
            self.running.run(self.running.engine.drop_workspace(workspace.name))


def test_sessions_at_once_get_the_answers_that_they_get_one_after_the_other(
    tiny: RunningEngine,
) -> None:
    """Integrity is checked after every step, in the midst of the others."""
    alone, together = Sessions(tiny, "alone"), Sessions(tiny, "together")
    expected = alone.one_after_the_other()
    alone.leave()
    answers = together.at_once()
    for session, (mine, wanted) in enumerate(zip(answers, expected, strict=True)):
        for step, (answer, same) in enumerate(zip(mine, wanted, strict=True)):
            assert answer.tokens == same.tokens, (session, step)
            assert answer.report is not None and same.report is not None
            assert answer.report.recalled and same.report.recalled
    (stats,) = tiny.run(tiny.engine.stats())
    assert stats["open_steps"] == stats["staged_pages_now"] == stats["watched_requests"] == 0
    together.leave()
    (stats,) = tiny.run(tiny.engine.stats())
    assert stats["blocks"] == stats["host_used_blocks"] == 0
    tiny.run(tiny.engine.check_integrity())
