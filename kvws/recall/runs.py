"""Runs of blocks, looked at as if each were one block: which are worth a close look.

A run is RUN_BLOCKS consecutive block numbers. Its key, in each head that looks for content, is the
mean of its blocks' keys: what is read of it is a five-hundredth of what a close look reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import groupby

import torch

from kvws.recall.device_rows import DeviceRows
from kvws.recall.shortlist import RUN_BLOCKS
from kvws.recall.signals.content import Content
from kvws.recall.signals.signal import Query, Tile, asking_tokens, to_half

ASKING_TOKENS = 32
"""Of a query's content rows ask the runs. Which of them are worth a close look hardly changes with
four times as many."""

Parts = tuple[torch.Tensor, ...]
BlocksOfTile = Callable[[int, torch.Tensor], tuple[Parts, torch.Tensor]]
"""Of a tile and rows of it: their parts, each [rows, *before, *after], and [rows] bool: which of
them are there."""


class RunIndex:
    """The mean keys of the runs of one workspace's blocks, brought up to date when asked."""

    def __init__(self, content: Content, tile_blocks: int) -> None:
        """
        Args:
            content: the signal whose blocks they are.
            tile_blocks: of a tile of its parts; whole runs.
        """
        assert tile_blocks % RUN_BLOCKS == 0, "a run lies in one tile"
        self._content = content
        self._of_means = content.of_means()
        self._runs_of_tile = tile_blocks // RUN_BLOCKS
        self._stale: set[int] = set()
        self._means = torch.zeros(self._shape(0), dtype=torch.float16)
        self._present = torch.zeros(0, dtype=torch.bool)

    def _shape(self, runs: int) -> tuple[int, ...]:
        (part,) = self._of_means.parts
        return (*part.before, runs, *part.after)

    @property
    def nbytes(self) -> int:
        return self._means.nbytes

    def note_written(self, blocks: Iterable[int]) -> None:
        """The rows of blocks are new."""
        self._stale.update(block // RUN_BLOCKS for block in blocks)

    def score(
        self, query: Query, blocks_of_tile: BlocksOfTile, near: DeviceRows | None = None
    ) -> torch.Tensor:
        """How much a query wants each run: as `Content` scores blocks, by the means of runs, for
        ASKING_TOKENS of the query's content rows at most.

        Args:
            near: where they are scored; None for host memory.

        Returns:
            [runs] float32, summed over this rank's heads; 0 where there is no block.
        """
        self._refresh(blocks_of_tile)
        query = _fewer_asking(query)
        anywhere = torch.zeros(len(self._present), dtype=torch.int64)
        tile = Tile((self._means,), self._present, anywhere)
        if near is not None and len(self._present):
            return near.score_tile(self._of_means, query, tile)
        return self._of_means.score(query, [tile])

    def _refresh(self, blocks_of_tile: BlocksOfTile) -> None:
        stale = sorted(self._stale)
        self._stale.difference_update(stale)  # what is written meanwhile stays for the next time
        if not stale:
            return
        self._make_room(stale[-1] + 1)
        for tile, runs in groupby(stale, key=lambda run: run // self._runs_of_tile):
            some = torch.tensor(list(runs))
            first = (some - tile * self._runs_of_tile) * RUN_BLOCKS
            rows = (first.unsqueeze(1) + torch.arange(RUN_BLOCKS)).flatten()
            parts, present = blocks_of_tile(tile, rows)
            keys = self._content.mean_keys(parts)
            keys[~present] = 0  # never written: whatever the memory held
            by_run = keys.view(len(some), RUN_BLOCKS, *keys.shape[1:]).sum(dim=1)
            count = present.view(len(some), RUN_BLOCKS).sum(dim=1)
            means = to_half(by_run / count.clamp(min=1).view(-1, 1, 1))
            self._means[:, some] = means.transpose(0, 1).unsqueeze(2)
            self._present[some] = count > 0

    def _make_room(self, runs: int) -> None:
        missing = runs - len(self._present)
        if missing <= 0:
            return
        missing = max(missing, len(self._present) // 2)  # so that growing is seldom
        more = torch.zeros(self._shape(missing), dtype=torch.float16)
        self._means = torch.cat([self._means, more], dim=1)
        self._present = torch.cat([self._present, torch.zeros(missing, dtype=torch.bool)])


def _fewer_asking(query: Query) -> Query:
    """A query of which no more than ASKING_TOKENS count for content, evenly spread."""
    tokens = query.heads.shape[1]
    rows = torch.arange(tokens)
    if query.content_rows is not None:
        rows = rows[query.content_rows]
    counts = torch.zeros(tokens, dtype=torch.bool)
    counts[rows[list(asking_tokens(len(rows), ASKING_TOKENS))]] = True
    return replace(query, content_rows=counts)
