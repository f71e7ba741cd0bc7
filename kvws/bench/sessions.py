"""Many sessions on one engine: what a step costs alone and among the others, and who waits for
whom.

All figures come from one run on one engine, so that their ratios hold on a machine whose speed
varies.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from rich.table import Table

from kvws.engine.protocol import Chunk, Engine
from kvws.limits import Limits
from kvws.observe.step_report import StepReport
from kvws.recall.recipe import Recipe
from kvws.recall.selector import Selector
from kvws.session.workspace import Workspace
from kvws.step import StepOutput, StepRequest, run_step

QUERY_TOKENS = 64
ANSWER_TOKENS = 8
_SAMPLING = {"temperature": 0.0, "ignore_eos": True}


class BenchSession:
    """A session of random tokens, each step of which asks with QUERY_TOKENS more of them."""

    def __init__(
        self, name: str, engine: Engine, limits: Limits, recipe: Recipe, seed: int
    ) -> None:
        self.workspace = Workspace(name)
        self.workspace.selector = Selector(recipe)
        self.limits = limits
        self._engine = engine
        self._rng = random.Random(seed)  # noqa: S311 (not for secrets)
        self._tokens: list[int] = []

    def random_tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(1000, 40_000) for _ in range(count)]

    async def grow(self, tokens: int) -> None:
        """Append tokens."""
        self._tokens += self.random_tokens(tokens)
        async for _ in self._run(1):
            pass

    async def step(self) -> StepReport:
        """Ask, and hear the answer to its end."""
        self._tokens += self.random_tokens(QUERY_TOKENS)
        outputs = [output async for output in self._run(ANSWER_TOKENS)]
        report = outputs[-1]
        assert isinstance(report, StepReport)
        return report

    async def answer(self, tokens: int) -> AsyncGenerator[Chunk, None]:
        """Ask, and hear an answer of so many tokens as it comes."""
        self._tokens += self.random_tokens(QUERY_TOKENS)
        outputs = self._run(tokens)
        try:
            async for output in outputs:
                if isinstance(output, Chunk):
                    yield output
        finally:
            await outputs.aclose()

    def _run(self, answer_tokens: int) -> AsyncGenerator[StepOutput, None]:
        request = StepRequest(
            "main", self._tokens, answer_tokens, keep_generated=False, sampling=_SAMPLING
        )
        return run_step(request, self.workspace, self._engine, self.limits)


@dataclass(frozen=True)
class StepTimes:
    """Wall milliseconds of whole steps.

    Attributes:
        alone: steps beside which nothing else ran.
        among: by session, its steps while all sessions stepped at once.
        all_ms: how long all of those took together.
    """

    alone: tuple[float, ...]
    among: tuple[tuple[float, ...], ...]
    all_ms: float

    @property
    def fairness(self) -> float:
        """The slowest session's time over the fastest one's; 1 where all get the same."""
        totals = [sum(steps) for steps in self.among]
        return max(totals) / min(totals)

    @property
    def gain(self) -> float:
        """Steps a second among all, over those of one session alone."""
        steps = sum(len(times) for times in self.among)
        return steps * statistics.median(self.alone) / self.all_ms


async def grown_sessions(
    engine: Engine,
    limits: Limits,
    recipe: Recipe,
    *,
    sessions: int,
    tokens: int,
    progress: Callable[[str], None],
) -> list[BenchSession]:
    """Sessions of so many tokens each, more than the budget."""
    grown: list[BenchSession] = []
    for number in range(sessions):
        progress(f"filling session {number + 1} of {sessions}")
        session = BenchSession(f"bench-{number}", engine, limits, recipe, seed=number)
        await session.grow(tokens)
        await session.step()  # leaves the sliding view of the filling behind
        grown.append(session)
    return grown


async def measure_steps(
    sessions: Sequence[BenchSession], *, steps: int, progress: Callable[[str], None]
) -> StepTimes:
    """Every session takes a step alone, then all of them take `steps` at once.

    Raises:
        RuntimeError: a step did without a selection, and would be no measure.
    """

    async def timed(session: BenchSession) -> float:
        begin = time.perf_counter()
        report = await session.step()
        if not report.recalled:
            raise RuntimeError("a session fits its budget: give it more tokens")
        return 1e3 * (time.perf_counter() - begin)

    async def several(session: BenchSession) -> tuple[float, ...]:
        return tuple([await timed(session) for _ in range(steps)])

    progress("one step of each session, alone")
    alone = tuple([await timed(session) for session in sessions])
    progress(f"{steps} steps of all sessions at once")
    begin = time.perf_counter()
    among = tuple(await asyncio.gather(*map(several, sessions)))
    return StepTimes(alone, among, 1e3 * (time.perf_counter() - begin))


def steps_table(times: StepTimes) -> Table:
    """A row for steps alone, and one for steps among the others."""
    table = Table(box=None, header_style="bold")
    table.add_column("steps")
    for name in ("number", "median", "p95", "ratio", "slowest / fastest", "steps / s"):
        table.add_column(name, justify="right")
    among = [ms for steps in times.among for ms in steps]
    alone_ms = statistics.median(times.alone)
    for name, values, fairness, gain in (
        ("alone", times.alone, "", "1.00x"),
        (
            f"among {len(times.among)}",
            among,
            f"{times.fairness:.2f}x",
            f"{times.gain:.2f}x",
        ),
    ):
        median_ms = statistics.median(values)
        table.add_row(
            name,
            str(len(values)),
            f"{median_ms:,.0f} ms",
            f"{percentile(values, 95):,.0f} ms",
            f"{median_ms / alone_ms:.2f}x",
            fairness,
            gain,
        )
    return table


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent of them do not exceed."""
    ascending = sorted(values)
    return ascending[min(len(ascending) - 1, int(len(ascending) * percent / 100))]
