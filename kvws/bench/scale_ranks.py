"""A rank that holds an index and nothing else, and says what looking into it took."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvws.engine.protocol import Scores
from kvws.engine.scores import runs_of_ranks, scores_of_ranks
from kvws.recall.index import BlockIndex

T = TypeVar("T")

READS_RUNS, READS_CLOSELY = "runs", "closely"


class IndexAlone:
    """Scores as an engine of one rank does, with queries that are there already.

    Attributes:
        seconds: by what was read, on the clock and of this process's CPU time.
    """

    def __init__(self, index: BlockIndex, queries: torch.Tensor) -> None:
        """`queries`: raw Q [layers, tokens, query_heads, head_dim] float32."""
        self.seconds = {READS_RUNS: (0.0, 0.0), READS_CLOSELY: (0.0, 0.0)}
        self._index = index
        self._queries = queries

    @property
    def scored_at_once_blocks(self) -> int | None:
        """As `Engine.scored_at_once_blocks`: any number."""
        return None

    async def score_runs(
        self, rid: str, workspace: str, content_rows: bytes = b""
    ) -> npt.NDArray[np.float32] | None:
        """As `Engine.score_runs`."""

        def work() -> bytes | None:
            scores = self._index.score_runs(self._queries, _mask(content_rows))
            return None if scores is None else scores.numpy().tobytes()

        return runs_of_ranks([self._timed(READS_RUNS, work)])

    async def score(
        self,
        rid: str,
        workspace: str,
        candidates: bytes,
        first_positions: bytes,
        query_first: int,
        content_rows: bytes = b"",
    ) -> Scores:
        """As `Engine.score`."""

        def work() -> dict[str, bytes]:
            positions = torch.tensor(np.frombuffer(first_positions, dtype="<i4"))
            scores = self._index.score(
                self._queries,
                positions.to(torch.int64),
                query_first,
                _mask(candidates),
                _mask(content_rows),
            )
            return {name: found.numpy().tobytes() for name, found in scores.items()}

        layers, rows, heads, _ = self._queries.shape
        found = self._timed(READS_CLOSELY, work)
        return scores_of_ranks([{"rows": rows, "heads": layers * heads, "scores": found}])

    def _timed(self, reads: str, work: Callable[[], T]) -> T:
        begin, cpu_begin = time.perf_counter(), time.process_time()
        result = work()
        self.seconds[reads] = time.perf_counter() - begin, time.process_time() - cpu_begin
        return result


def _mask(flags: bytes) -> torch.Tensor:
    return torch.tensor(np.frombuffer(flags, dtype=np.uint8) != 0)
