"""How long a decoding session waits for its next token, by what other sessions do meanwhile.

Each disturbance goes on without a pause while the answer is decoded, so its row is a worst case.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
from rich.table import Table

from kvws.bench.sessions import BenchSession, percentile
from kvws.blocks.key import BLOCK_TOKENS
from kvws.engine.protocol import Engine
from kvws.observe.step_report import StepReport
from kvws.prefill import EngineStep

_SCORED_QUERY_TOKENS = 128
_PREFILLED_TOKENS = BLOCK_TOKENS

Disturbance = Callable[[], Awaitable[None]]


@dataclass
class Gaps:
    """Milliseconds between the tokens of an answer.

    Attributes:
        meanwhile: what the other sessions did.
        gaps_ms: all rounds together.
        disturbances_ms: how long each disturbance took.
    """

    meanwhile: str
    gaps_ms: list[float] = field(default_factory=list[float])
    disturbances_ms: list[float] = field(default_factory=list[float])


async def measure_gaps(
    engine: Engine,
    sessions: Sequence[BenchSession],
    *,
    tokens: int,
    companions: int,
    index_blocks: int,
    rounds: int,
    progress: Callable[[str], None],
) -> list[Gaps]:
    """Decode one session's answers beside what the others do: nothing; decode; and beside that
    prefill 32 tokens, prefill them behind a view that is staged in from the host, score a large
    index, or take whole steps.

    Args:
        sessions: the first decodes, the next `companions` decode beside it, the one behind them
            stages in, the last takes steps.
        tokens: of a measured answer.
        index_blocks: blocks that are scored.
    """
    measured, beside = sessions[0], sessions[1 : 1 + companions]
    loading, stepping = sessions[1 + companions], sessions[-1]
    async with AsyncExitStack() as held:
        progress(f"filling an index of {index_blocks:,} blocks")
        scoring = await held.enter_async_context(_scoring(engine, loading, index_blocks))
        situations: list[tuple[Gaps, Sequence[BenchSession], Disturbance | None]] = [
            (Gaps("nothing"), (), None),
            (Gaps("decode"), beside, None),
            (Gaps("decode + prefill"), beside, _prefilling(engine, loading)),
            (Gaps("decode + stage in"), beside, _staging(engine, loading)),
            (Gaps("decode + score"), beside, scoring),
            (Gaps("decode + step"), beside, _stepping(stepping)),
        ]
        for number in range(rounds):
            for gaps, decoding, disturbance in situations:
                progress(f"round {number + 1} of {rounds}: the others do {gaps.meanwhile}")
                await _measure(gaps, measured, decoding, disturbance, tokens)
    return [gaps for gaps, _, _ in situations]


def gaps_table(measured: Sequence[Gaps]) -> Table:
    """One row a situation; ratios to that in which the others only decode."""
    table = Table(box=None, header_style="bold")
    table.add_column("the others")
    for name in ("p50", "p99", "max", "mean", "ratio", "done", "each"):
        table.add_column(name, justify="right")
    baseline = statistics.fmean(measured[1].gaps_ms)
    for gaps in measured:
        mean = statistics.fmean(gaps.gaps_ms)
        table.add_row(
            gaps.meanwhile,
            *(f"{percentile(gaps.gaps_ms, at):,.0f} ms" for at in (50, 99, 100)),
            f"{mean:,.0f} ms",
            f"{mean / baseline:.2f}x",
            str(len(gaps.disturbances_ms) or ""),
            f"{statistics.median(gaps.disturbances_ms):,.0f} ms" if gaps.disturbances_ms else "",
        )
    return table


async def _measure(
    gaps: Gaps,
    measured: BenchSession,
    decoding: Sequence[BenchSession],
    disturbance: Disturbance | None,
    tokens: int,
) -> None:
    """One answer of `measured`, while the companions are in the middle of longer ones."""
    async with AsyncExitStack() as running:
        for companion in decoding:
            await running.enter_async_context(_decoding(companion, 4 * tokens))
        ended = asyncio.Event()

        async def disturb() -> None:
            while disturbance is not None and not ended.is_set():
                begin = time.perf_counter()
                await disturbance()
                gaps.disturbances_ms.append(1e3 * (time.perf_counter() - begin))

        async with aclosing(measured.answer(tokens)) as answer:
            await anext(answer)
            disturbing = asyncio.create_task(disturb())
            before = time.perf_counter()
            async for _ in answer:
                now = time.perf_counter()
                gaps.gaps_ms.append(1e3 * (now - before))
                before = now
        ended.set()
        await disturbing


@asynccontextmanager
async def _decoding(session: BenchSession, tokens: int) -> AsyncGenerator[None]:
    """A session that decodes meanwhile; it is cut off at the end."""
    started = asyncio.Event()

    async def decode() -> None:
        async with aclosing(session.answer(tokens)) as answer:
            async for _ in answer:
                started.set()

    decoding = asyncio.create_task(decode())
    decoding.add_done_callback(lambda _: started.set())
    await started.wait()
    try:
        yield
    finally:
        if decoding.done():
            decoding.result()
        decoding.cancel()
        await asyncio.wait([decoding])


def _stepping(session: BenchSession) -> Disturbance:
    async def step() -> None:
        await session.step()

    return step


def _prefilling(engine: Engine, session: BenchSession) -> Disturbance:
    async def prefill() -> None:
        await _pass(engine, session, [])

    return prefill


def _staging(engine: Engine, session: BenchSession) -> Disturbance:
    """Load a view of the session's blocks in an order that the device has not seen."""
    rng = random.Random(5)  # noqa: S311 (not for secrets)
    blocks = session.workspace.thread("main").line[: session.limits.budget_blocks]

    async def stage_in() -> None:
        await _pass(engine, session, rng.sample(blocks, len(blocks)))

    return stage_in


async def _pass(engine: Engine, session: BenchSession, view: Sequence[int]) -> None:
    """Compute new tokens behind a view, and keep nothing."""
    report = StepReport("main")
    async with EngineStep(session.workspace, engine, session.limits, report) as step:
        prompt = await step.promise(view, session.random_tokens(_PREFILLED_TOKENS))
        async for _ in step.run(prompt, rid=f"{step.id}.pass", max_new_tokens=0):
            pass


@asynccontextmanager
async def _scoring(
    engine: Engine, session: BenchSession, index_blocks: int
) -> AsyncGenerator[Disturbance]:
    """Scores of a large index for a query that stays tapped.

    Its blocks are computed as the session's first page and so become copies of that block.
    """
    large = f"{session.workspace.name}-large"
    report = StepReport("main")
    async with (
        EngineStep(session.workspace, engine, session.limits, report) as probe,
        EngineStep(session.workspace, engine, session.limits, report) as keeping,
    ):
        (first_page,) = (await keeping.promise([0], [])).promised_pages()
        await engine.open_step("fill", large)
        copies = [(first_page[0], number, 0) for number in range(index_blocks)]
        await engine.close_step("fill", copies)
        rid = f"{probe.id}.probe"
        prompt = await probe.promise([], session.random_tokens(_SCORED_QUERY_TOKENS))
        await engine.watch_queries(rid, 0)
        async for _ in probe.run(prompt, rid=rid, max_new_tokens=0):
            pass
        positions = BLOCK_TOKENS * np.arange(index_blocks, dtype=np.int32)

        async def score() -> None:
            scores = await engine.score(
                rid,
                large,
                bytes([1]) * index_blocks,
                positions.tobytes(),
                BLOCK_TOKENS * index_blocks,
            )
            if scores.rows != _SCORED_QUERY_TOKENS:
                raise RuntimeError(f"{scores.rows} query rows were scored")

        yield score
    await engine.drop_workspace(large)
