"""Exact scoring beside what the machine allows: reading the index, and multiplying matrices.

All that is compared is taken by turns in one run. The index is read by adding up its own tensors,
and copied to other memory; matrices of the size that scoring multiplies are multiplied again and
again. Whichever of reading and multiplying takes longer is the limit that binds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch
from rich.table import Table

from kvws.bench.scale_index import VariedRows, grow_index, random_queries, signals_of
from kvws.bench.scale_memory import PeakMemory, free_bytes, megabytes
from kvws.bench.score_work import Multiplications, multiplications
from kvws.blocks.key import BLOCK_TOKENS
from kvws.models.geometry import ModelGeometry
from kvws.recall.index import BlockIndex
from kvws.recall.profile import Profile
from kvws.recall.signals.enabled import EnabledSignals
from kvws.recall.signals.signal import Query, Signal, Tile

ARMS = {
    "mean-k": ("mean-k",),
    "rotated-mean": ("rotated-mean",),
    "content": ("content",),
    "auto": ("rotated-mean", "content"),
}
"""Sets of signals; the last one is the default."""

_COPY_BYTES = 256 << 20
"""Memory that the index is copied to, over and over: far more than a cache."""

_SCRATCH_BYTES = 1 << 30
"""Left free beside an index."""

_MULTIPLY_S = 0.1
_SINK_BLOCKS, _RECENT_BLOCKS = 1, 16
"""They never compete."""


@dataclass(frozen=True)
class ScoreCost:
    """Scoring all blocks once with one set of signals; medians over the repetitions.

    Attributes:
        index_bytes: of all blocks' rows, each of which is read.
        operations: multiplications and additions that the signals' definitions ask for.
        clock_ms, cpu_ms: of scoring.
        read_ms: of adding up the index's own tensors.
        copy_ms: of copying them to other memory.
        multiply_ms: of as many multiplications and additions in plain matrix products.
        of_read, of_multiply: those of reading and of multiplying over those of scoring, each
            within a repetition.
        extra_bytes: memory that the first scoring took beside the index; None where the system
            does not tell.
    """

    signals: str
    blocks: int
    query_tokens: int
    index_bytes: int
    operations: int
    clock_ms: float
    cpu_ms: float
    read_ms: float
    copy_ms: float
    multiply_ms: float
    of_read: float
    of_multiply: float
    extra_bytes: int | None

    @property
    def binds(self) -> str:
        """The limit that scoring cannot be faster than."""
        return "read" if self.of_read >= self.of_multiply else "multiply"

    @property
    def of_limit(self) -> float:
        """The part of it that scoring reaches."""
        return max(self.of_read, self.of_multiply)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "binds": self.binds, "of_limit": self.of_limit}


def measure_score(
    geometry: ModelGeometry,
    profile: Profile,
    *,
    blocks: int,
    query_tokens: Sequence[int],
    arms: Sequence[str] = tuple(ARMS),
    threads: int = 1,
    repetitions: int = 3,
    progress: Callable[[str], None] = lambda line: None,
    seed: int = 7,
) -> list[ScoreCost]:
    """One index after the other, each with every number of query tokens. What memory does not
    allow is left out, with a line.

    Args:
        blocks: of an index.
        arms: of `ARMS`.
        threads: of torch. On one thread, ratios are of CPU time: other work on the machine does
            not stretch it. On several they are of time on the clock.
    """
    torch.set_num_threads(threads)
    costs: list[ScoreCost] = []
    for arm in arms:
        signals = signals_of(ARMS[arm], geometry, profile)
        index_bytes, free = blocks * signals.row_bytes, free_bytes()
        if index_bytes + _SCRATCH_BYTES > free:
            progress(
                f"left out: {arm} has an index of {index_bytes / 1e9:.1f} GB, "
                f"{free / 1e9:.1f} GB are free"
            )
            continue
        progress(f"{arm}: an index of {blocks:,} blocks, {index_bytes / 1e9:.2f} GB")
        index = _Index(signals, VariedRows(signals, geometry, seed), blocks)
        for tokens in query_tokens:
            progress(f"{arm}: {tokens} query tokens")
            work = multiplications(
                ARMS[arm], geometry, profile, blocks=blocks, query_tokens=tokens
            )
            queries = random_queries(geometry, tokens, seed)
            with PeakMemory() as memory:
                index.score(queries)
            times = _Times(threads)
            for _ in range(repetitions):
                times.take(partial(index.score, queries), index.words(), work)
            costs.append(
                ScoreCost(
                    signals=arm,
                    blocks=blocks,
                    query_tokens=tokens,
                    index_bytes=index_bytes,
                    operations=sum(each.operations for each in work),
                    extra_bytes=memory.extra_bytes,
                    **times.medians(),
                )
            )
        del index  # before memory is taken for the next one
    return costs


class _Index:
    """An index all of whose blocks but the first and the newest compete."""

    def __init__(self, signals: EnabledSignals, rows: VariedRows, blocks: int) -> None:
        self._seen = [_Seen(signal) for signal in signals.signals]
        self._index = BlockIndex(EnabledSignals(self._seen, []))
        grow_index(self._index, rows, 0, blocks)
        self._candidates = torch.ones(blocks, dtype=torch.bool)
        self._candidates[:_SINK_BLOCKS] = False
        self._candidates[max(0, blocks - _RECENT_BLOCKS) :] = False
        self._first_positions = BLOCK_TOKENS * torch.arange(blocks)

    def score(self, queries: torch.Tensor) -> None:
        """Score all blocks exactly, for a question behind the newest one."""
        behind = BLOCK_TOKENS * len(self._candidates)
        self._index.score(queries, self._first_positions, behind, self._candidates)

    def words(self) -> list[torch.Tensor]:
        """All that was there to read when it was last scored: each [words] int64."""
        return [_words(tensor) for signal in self._seen for tensor in signal.tensors]


class _Seen:
    """A signal that remembers which tensors it was given to score, and is else as it is.

    Attributes:
        tensors: all parts of all tiles.
    """

    def __init__(self, signal: Signal) -> None:
        self.name, self.parts, self.row_format = signal.name, signal.parts, signal.row_format
        self.rows, self.importance = signal.rows, signal.importance
        self.tensors: list[torch.Tensor] = []
        self._signal = signal

    def score(self, query: Query, tiles: Sequence[Tile]) -> torch.Tensor:
        self.tensors = [part for tile in tiles for part in tile.parts]
        return self._signal.score(query, tiles)


class _Times:
    """Seconds of scoring and of its limits, one entry a repetition."""

    def __init__(self, threads: int) -> None:
        self._now = time.process_time if threads == 1 else time.perf_counter
        self._clock_s: list[float] = []
        self._cpu_s: list[float] = []
        self._read_s: list[float] = []
        self._copy_s: list[float] = []
        self._multiply_s: list[float] = []

    def take(
        self,
        score: Callable[[], None],
        words: Sequence[torch.Tensor],
        work: Sequence[Multiplications],
    ) -> None:
        """One repetition."""
        self._read_s.append(self._seconds(partial(_read, words)))
        self._copy_s.append(self._seconds(partial(_copy, words, _copies(words))))
        self._multiply_s.append(sum(map(self._multiplying_s, work)))
        begin, cpu_begin = time.perf_counter(), time.process_time()
        score()
        self._clock_s.append(time.perf_counter() - begin)
        self._cpu_s.append(time.process_time() - cpu_begin)

    def medians(self) -> dict[str, float]:
        scored_s = self._cpu_s if self._now is time.process_time else self._clock_s
        return {
            "clock_ms": 1e3 * statistics.median(self._clock_s),
            "cpu_ms": 1e3 * statistics.median(self._cpu_s),
            "read_ms": 1e3 * statistics.median(self._read_s),
            "copy_ms": 1e3 * statistics.median(self._copy_s),
            "multiply_ms": 1e3 * statistics.median(self._multiply_s),
            "of_read": _median_ratio(self._read_s, scored_s),
            "of_multiply": _median_ratio(self._multiply_s, scored_s),
        }

    def _seconds(self, work: Callable[[], object]) -> float:
        begin = self._now()
        work()
        return self._now() - begin

    def _multiplying_s(self, work: Multiplications) -> float:
        """What all operations take at the speed of a few."""
        rows, common, columns = work.shape
        a, b = torch.randn(rows, common), torch.randn(common, columns)
        out = torch.mm(a, b)
        done, begin, spent_s = 0, self._now(), 0.0
        while spent_s < _MULTIPLY_S:
            torch.mm(a, b, out=out)
            done += 1
            spent_s = self._now() - begin
        return work.operations * spent_s / (done * 2 * rows * common * columns)


def _read(words: Sequence[torch.Tensor]) -> None:
    for some in words:
        some.sum()


def _copy(words: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
    for some, copy in zip(words, cycle(copies)):
        copy[: len(some)].copy_(some)


def _copies(words: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Memory for some of the tensors, written to already."""
    longest = max(map(len, words))
    count = max(1, min(len(words), _COPY_BYTES // (8 * longest)))
    return [torch.ones(longest, dtype=torch.int64) for _ in range(count)]


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """A part of a tile as far as its bytes make 64-bit numbers: [words] int64.

    A view, but for the last tile: scoring reads its beginning alone.
    """
    flat = tensor.reshape(-1).view(torch.uint8)
    return flat[: len(flat) // 8 * 8].view(torch.int64)


def _median_ratio(limits_s: Sequence[float], scored_s: Sequence[float]) -> float:
    return statistics.median(
        limit / scored for limit, scored in zip(limits_s, scored_s, strict=True)
    )


def score_table(costs: Sequence[ScoreCost], tokens: int) -> Table:
    """One row a set of signals and number of query tokens."""
    table = Table(title=f"{tokens:,} tokens", box=None, header_style="bold")
    for name in (
        "signals", "query", "clock ms", "CPU ms", "GB/s", "GB/s read", "GB/s copied", "GFLOP/s",
        "GFLOP/s of mm", "of read", "of mm", "binds", "extra MB",
    ):  # fmt: skip
        table.add_column(name, justify="left" if name in ("signals", "binds") else "right")
    for cost in costs:
        scored_ms = cost.read_ms / cost.of_read
        table.add_row(
            cost.signals,
            f"{cost.query_tokens:,}",
            f"{cost.clock_ms:,.0f}",
            f"{cost.cpu_ms:,.0f}",
            *(
                f"{cost.index_bytes / ms / 1e6:,.1f}"
                for ms in (scored_ms, cost.read_ms, cost.copy_ms)
            ),
            *(f"{cost.operations / ms / 1e6:,.1f}" for ms in (scored_ms, cost.multiply_ms)),
            f"{cost.of_read:.0%}",
            f"{cost.of_multiply:.0%}",
            f"{cost.binds} {cost.of_limit:.0%}",
            megabytes(cost.extra_bytes),
        )
    return table
