"""What staging computed pages out, and writing them to disk behind, adds to prefill time."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.table import Table

from kvws.blocks.key import BLOCK_TOKENS, page_hashes
from kvws.engine.client import SglangEngine
from kvws.engine.protocol import GenerateRequest
from kvws.store.directory import StoreDirectory
from kvws.store.identity import ModelIdentity


@dataclass
class StageOutCost:
    """One session prefilled chunk by chunk, with and without stage-out; one entry a round.

    Attributes:
        chunk_tokens: tokens of a chunk.
        chunks: chunks of a session, each behind those before it.
        without_ms: sum of the chunks' prefill times, their pages refused.
        with_ms: the same, every page copied to the host while chunks before it go to disk.
        naming_ms: what closing the steps took: means, index, residency.
        to_disk: whether there was a disk tier.
    """

    chunk_tokens: int
    chunks: int
    to_disk: bool
    without_ms: list[float] = field(default_factory=list[float])
    with_ms: list[float] = field(default_factory=list[float])
    naming_ms: list[float] = field(default_factory=list[float])

    @property
    def added(self) -> float:
        """Median over the rounds of the share that stage-out adds to prefill time."""
        pairs = zip(self.with_ms, self.without_ms, strict=True)
        return statistics.median(staged / plain - 1 for staged, plain in pairs)


async def measure_stage_out(
    engine: SglangEngine,
    store: StoreDirectory | None,
    identity: ModelIdentity,
    *,
    chunk_tokens: int,
    chunks: int,
    rounds: int,
    progress: Callable[[str], None],
    seed: int = 0,
) -> StageOutCost:
    """Measure pairs: the same tokens in the same chunks, which side goes first alternates."""
    rng = random.Random(seed)  # noqa: S311 (not for secrets)
    cost = StageOutCost(chunk_tokens, chunks, to_disk=store is not None)
    for number in range(-1, rounds):  # the first round warms up
        progress(f"round {number + 1} of {rounds}")
        tokens = [rng.randrange(1000, 40000) for _ in range(chunk_tokens * chunks)]
        name = f"bench-stage-out-{number}"
        if store is not None:
            folder = store.open_workspace(name, identity)
            await engine.attach(name, str(folder))
        sides = [_Side(engine, name, staged=staged) for staged in (False, True)]
        for side in sides if number % 2 else reversed(sides):
            await side.prefill(tokens, chunk_tokens)
        plain, staged = sides
        while await engine.unsaved_blocks(name):  # noqa: ASYNC110 (ranks cannot call back)
            await asyncio.sleep(0.01)
        await engine.drop_workspace(name)
        if store is not None:
            store.remove(name)
        if number >= 0:
            cost.without_ms.append(plain.prefill_ms)
            cost.with_ms.append(staged.prefill_ms)
            cost.naming_ms.append(staged.naming_ms)
    return cost


def stage_out_table(cost: StageOutCost) -> Table:
    """One row."""
    table = Table(box=None, header_style="bold")
    for name in ("session", "refused", "staged out", "naming", "added to prefill"):
        table.add_column(name, justify="right")
    medians = (cost.without_ms, cost.with_ms, cost.naming_ms)
    table.add_row(
        f"{cost.chunks} x {cost.chunk_tokens} tokens" + (", to disk" if cost.to_disk else ""),
        *(f"{statistics.median(ms):,.0f} ms" for ms in medians),
        f"{cost.added:+.1%}",
    )
    return table


class _Side:
    """One of a pair of sessions."""

    def __init__(self, engine: SglangEngine, workspace: str, *, staged: bool) -> None:
        self.prefill_ms = 0.0
        self.naming_ms = 0.0
        self._engine = engine
        self._workspace = workspace
        self._staged = staged
        self._namespace = f"{workspace}/{'staged' if staged else 'plain'}"

    async def prefill(self, tokens: list[int], chunk_tokens: int) -> None:
        """Chunk by chunk, so that stage-out of one overlaps with the next."""
        for end in range(chunk_tokens, len(tokens) + 1, chunk_tokens):
            step = f"{self._namespace}/{end}"
            if self._staged:
                await self._engine.open_step(step, self._workspace)
            begin = time.perf_counter()
            request = GenerateRequest(
                rid=f"{step}.prefill",
                step=step,
                namespace=self._namespace,
                token_ids=tokens[:end],
                max_new_tokens=0,
            )
            async for _ in self._engine.generate(request):
                pass
            self.prefill_ms += 1e3 * (time.perf_counter() - begin)
            if self._staged:
                begin = time.perf_counter()
                first = (end - chunk_tokens) // BLOCK_TOKENS
                names = page_hashes(tokens[:end], self._namespace)
                named = [(names[page], page, page) for page in range(first, len(names))]
                closed = await self._engine.close_step(step, named)
                if len(closed.resident) != len(named):
                    raise RuntimeError(f"{len(named) - len(closed.resident)} pages were not kept")
                self.naming_ms += 1e3 * (time.perf_counter() - begin)
