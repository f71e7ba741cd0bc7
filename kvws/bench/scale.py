"""What a step's data path costs in sessions of up to ten million tokens, beside a small one.

One session grows from size to size. At each, some steps are taken with a shortlist, as the product
does, and one with a close look at every block.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from kvws.bench.scale_memory import free_bytes, megabytes
from kvws.bench.scale_session import LongSession
from kvws.bench.step import PARTS, SCORING, DataPath, PartTimes
from kvws.blocks.key import BLOCK_TOKENS
from kvws.errors import ConfigError
from kvws.limits import Limits
from kvws.serving.garbage import freeze_what_is_loaded

_SCRATCH_BYTES = 1 << 30
"""Left free for the steps themselves."""


@dataclass(frozen=True)
class SizeCost:
    """Steps of a session of one size.

    Attributes:
        tokens, blocks: of the session.
        index_bytes: of the blocks' index rows.
        text_bytes: how much the process grew by knowing what the blocks say.
        shortlisted: with a close look at the best alone.
        exact: with a close look at all.
    """

    tokens: int
    blocks: int
    index_bytes: int
    text_bytes: int
    shortlisted: PartTimes
    exact: PartTimes

    def as_json(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "blocks": self.blocks,
            "index_bytes": self.index_bytes,
            "text_bytes": self.text_bytes,
            "shortlisted": self.shortlisted.as_json(),
            "exact": self.exact.as_json(),
        }


def measure_scale(
    model: Path,
    limits: Limits,
    sizes: Sequence[int],
    *,
    query_tokens: int = 128,
    staged_blocks: int = 64,
    steps: int = 5,
    exact_steps: int = 1,
    threads: int = 1,
    progress: Callable[[str], None] = lambda line: None,
) -> list[SizeCost]:
    """Sizes that the machine's memory does not allow are left out, with a line each.

    Args:
        model: folder of the model whose tokenizer and sizes the session has.
        sizes: tokens of the session, each more than a budget.
        threads: of torch.

    Raises:
        ConfigError: a size fits the view, or the model has no retrieval profile.
    """
    if min(sizes) // BLOCK_TOKENS <= limits.budget_blocks:
        raise ConfigError(
            f"a session of {min(sizes):,} tokens fits a view of {limits.budget_tokens:,}: there "
            "is nothing to choose",
            hint="raise --tokens, or lower --budget",
        )
    torch.set_num_threads(threads)
    session = LongSession(model, limits)
    path = DataPath(session, query_tokens=query_tokens, staged_blocks=staged_blocks)
    freeze_what_is_loaded()  # as the endpoint does
    costs: list[SizeCost] = []
    for tokens in sorted(sizes):
        blocks = tokens // BLOCK_TOKENS
        missing_bytes = (blocks - session.blocks) * session.bytes_per_block + _SCRATCH_BYTES
        if missing_bytes > free_bytes():
            progress(
                f"left out: {tokens:,} tokens need {missing_bytes / 1e9:.1f} GB more, "
                f"{free_bytes() / 1e9:.1f} GB are free"
            )
            continue
        session.grow(blocks, progress)
        progress(f"{tokens:,} tokens: {steps} steps, then {exact_steps} with every block")
        costs.append(
            SizeCost(
                tokens=tokens,
                blocks=session.blocks,
                index_bytes=session.index.nbytes,
                text_bytes=session.text_bytes,
                shortlisted=asyncio.run(path.steps(steps, limits.scored_blocks)),
                exact=asyncio.run(path.steps(exact_steps, 2 * session.blocks)),
            )
        )
    return costs


def scale_table(costs: Sequence[SizeCost], *, cpu: bool) -> Table:
    """One row a size; growth against the first.

    Args:
        cpu: milliseconds of CPU time, which other work on the machine does not stretch; otherwise
            on the clock.
    """
    title = "milliseconds of CPU time" if cpu else "milliseconds on the clock"
    table = Table(title=title, box=None, header_style="bold")
    for name in (
        "tokens", "read", "score", "choose, plan", "commit", "stage-in", "all", "growth",
        "extra MB", "exact: score", "all", "growth", "extra MB", "index MB", "text MB",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for cost in costs:
        near, exact, smallest = cost.shortlisted, cost.exact, costs[0]
        groups = (
            ("read new blocks",), SCORING, ("choose and plan",), ("commit",), ("stage-in",), PARTS,
        )  # fmt: skip
        table.add_row(
            f"{cost.tokens:,}",
            *(f"{near.median_ms(*parts, cpu=cpu):,.1f}" for parts in groups),
            f"{_growth(near, smallest.shortlisted, cpu):.2f}×",
            megabytes(near.extra_bytes),
            f"{exact.median_ms(*SCORING, cpu=cpu):,.0f}",
            f"{exact.median_ms(cpu=cpu):,.0f}",
            f"{_growth(exact, smallest.exact, cpu):.1f}×",
            megabytes(exact.extra_bytes),
            megabytes(cost.index_bytes),
            megabytes(cost.text_bytes),
        )
    return table


def _growth(times: PartTimes, smallest: PartTimes, cpu: bool) -> float:
    return times.median_ms(cpu=cpu) / smallest.median_ms(cpu=cpu)
