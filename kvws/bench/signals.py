"""What the index of each signal weighs, and what scoring with it costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from rich.table import Table

from kvws.blocks.key import BLOCK_TOKENS
from kvws.kernels.rotary import RotaryTable
from kvws.models.geometry import ModelGeometry
from kvws.recall.index import BlockIndex
from kvws.recall.profile import Profile
from kvws.recall.signals.build import KeyGeometry, enabled_signals
from kvws.recall.signals.enabled import EnabledSignals, raw_keys

_SAMPLE_BLOCKS = 32
_WINDOW_TOKENS = 4096


@dataclass(frozen=True)
class SignalCost:
    """One set of signals.

    Attributes:
        block_bytes: of a block's index row.
        score_ms: CPU milliseconds to score all blocks once, one entry a repetition.
    """

    name: str
    block_bytes: int
    score_ms: tuple[float, ...]


def measure_signals(
    geometry: ModelGeometry,
    profile: Profile,
    *,
    blocks: int,
    query_tokens: int,
    repetitions: int,
    progress: Callable[[str], None],
) -> list[SignalCost]:
    """Score random keys of a model's sizes, on one thread, by turns."""
    torch.set_num_threads(1)
    chance = torch.Generator()
    chance.manual_seed(7)
    means = replace(profile, content_keys="means")
    arms: list[tuple[str, tuple[str, ...], Profile]] = [
        ("mean-k", ("mean-k",), profile),
        ("rotated-mean", ("rotated-mean",), profile),
        (f"content ({profile.content_keys})", ("content",), profile),
        (f"auto ({profile.content_keys})", ("rotated-mean", "content"), profile),
        ("auto (means)", ("rotated-mean", "content"), means),
    ]
    table = _rotary(geometry)
    sizes = KeyGeometry(geometry.layers, geometry.kv_heads, geometry.head_dim)
    enabled = [enabled_signals(names, sizes, table, of) for _, names, of in arms]
    sample = torch.randn(
        geometry.layers,
        _SAMPLE_BLOCKS * BLOCK_TOKENS,
        geometry.kv_heads,
        geometry.head_dim,
        generator=chance,
    )
    indexes = [_index(signals, sample, blocks) for signals in enabled]
    times: list[list[float]] = [[] for _ in arms]
    queries = torch.randn(
        geometry.layers,
        query_tokens,
        geometry.query_heads,
        geometry.head_dim,
        generator=chance,
    )
    for repetition in range(repetitions):
        progress(f"{blocks} blocks: repetition {repetition + 1} of {repetitions}")
        for index, measured in zip(indexes, times, strict=True):
            begin = time.process_time()
            index.score(
                queries,
                BLOCK_TOKENS * torch.arange(blocks),
                BLOCK_TOKENS * blocks,
                torch.ones(blocks, dtype=torch.bool),
            )
            measured.append(1e3 * (time.process_time() - begin))
    return [
        SignalCost(name, signals.row_bytes, tuple(measured))
        for (name, _, _), signals, measured in zip(arms, enabled, times, strict=True)
    ]


def _rotary(geometry: ModelGeometry) -> list[RotaryTable]:
    half = geometry.head_dim // 2
    frequencies = 10_000.0 ** (-torch.arange(half) / half)
    angles = torch.arange(_WINDOW_TOKENS).unsqueeze(1) * frequencies
    return [RotaryTable(angles.cos(), angles.sin(), interleaved=False)] * geometry.layers


def _index(signals: EnabledSignals, keys: torch.Tensor, blocks: int) -> BlockIndex:
    """The rows of a few blocks, over and over."""
    rows = signals.rows(raw_keys(keys), torch.full((_SAMPLE_BLOCKS,), -1))
    index = BlockIndex(signals)
    for first in range(0, blocks, _SAMPLE_BLOCKS):
        some = range(first, min(blocks, first + _SAMPLE_BLOCKS))
        index.write(some, rows[: len(some)])
    return index


def signals_table(costs: Sequence[SignalCost], blocks: int) -> Table:
    """One row a set of signals; ratios to the first."""
    table = Table(box=None, header_style="bold")
    time_column = f"CPU ms, {blocks:,} blocks"
    for name in ("signals", "bytes a block", "of mean-k", time_column, "of mean-k"):
        table.add_column(name, justify="right")
    baseline = costs[0]
    for cost in costs:
        median = statistics.median(cost.score_ms)
        table.add_row(
            cost.name,
            f"{cost.block_bytes:,}",
            f"{cost.block_bytes / baseline.block_bytes:.2f}",
            f"{median:,.0f}",
            f"{median / statistics.median(baseline.score_ms):.2f}",
        )
    return table
