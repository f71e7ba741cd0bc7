"""What a step's data path costs in sessions of up to ten million tokens, beside a small one.

One session grows from size to size. At each, it and a new one of the smallest size take some steps
in turn, with a shortlist as the product does, and one with a close look at every block: growth is
what a step takes over what the small session's takes just then.
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
from kvws.bench.step import PARTS, SCORING, DataPath, PartTimes, steps_in_turn
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
        small_shortlisted, small_exact: steps of the small session beside those; the same ones
            where there is but one size.
    """

    tokens: int
    blocks: int
    index_bytes: int
    text_bytes: int
    shortlisted: PartTimes
    exact: PartTimes
    small_shortlisted: PartTimes
    small_exact: PartTimes

    def as_json(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "blocks": self.blocks,
            "index_bytes": self.index_bytes,
            "text_bytes": self.text_bytes,
            "shortlisted": self.shortlisted.as_json(),
            "exact": self.exact.as_json(),
            "small_shortlisted": self.small_shortlisted.as_json(),
            "small_exact": self.small_exact.as_json(),
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

    def new_path() -> DataPath:
        session = LongSession(model, limits)
        return DataPath(session, query_tokens=query_tokens, staged_blocks=staged_blocks)

    path, smallest_blocks = new_path(), min(sizes) // BLOCK_TOKENS
    session = path.session
    freeze_what_is_loaded()  # as the endpoint does
    costs: list[SizeCost] = []
    for tokens in sorted(sizes):
        blocks = tokens // BLOCK_TOKENS
        paths = [path] if len(sizes) == 1 else [path, new_path()]
        missing_blocks = blocks - session.blocks + (len(paths) - 1) * smallest_blocks
        missing_bytes = missing_blocks * session.bytes_per_block + _SCRATCH_BYTES
        if missing_bytes > free_bytes():
            progress(
                f"left out: {tokens:,} tokens need {missing_bytes / 1e9:.1f} GB more, "
                f"{free_bytes() / 1e9:.1f} GB are free"
            )
            continue
        session.grow(blocks, progress)
        for beside in paths[1:]:
            beside.session.grow(smallest_blocks, progress)
        progress(f"{tokens:,} tokens: {steps} steps, then {exact_steps} with every block")
        index_bytes, text_bytes = session.index.nbytes, session.text_bytes
        near = asyncio.run(steps_in_turn(paths, steps, limits.scored_blocks))
        exact = asyncio.run(steps_in_turn(paths, exact_steps, 2 * session.blocks))
        costs.append(
            SizeCost(
                tokens=tokens,
                blocks=blocks,
                index_bytes=index_bytes,
                text_bytes=text_bytes,
                shortlisted=near[0],
                exact=exact[0],
                small_shortlisted=near[-1],
                small_exact=exact[-1],
            )
        )
    return costs


def scale_table(costs: Sequence[SizeCost], *, cpu: bool) -> Table:
    """One row a size; growth against the small session.

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
        near, exact = cost.shortlisted, cost.exact
        groups = (
            ("read new blocks",), SCORING, ("choose and plan",), ("commit",), ("stage-in",), PARTS,
        )  # fmt: skip
        table.add_row(
            f"{cost.tokens:,}",
            *(f"{near.median_ms(*parts, cpu=cpu):,.1f}" for parts in groups),
            f"{near.growth(cost.small_shortlisted, cpu=cpu):.2f}×",
            megabytes(near.extra_bytes),
            f"{exact.median_ms(*SCORING, cpu=cpu):,.0f}",
            f"{exact.median_ms(cpu=cpu):,.0f}",
            f"{exact.growth(cost.small_exact, cpu=cpu):.1f}×",
            megabytes(exact.extra_bytes),
            megabytes(cost.index_bytes),
            megabytes(cost.text_bytes),
        )
    return table
