"""The retrieval index of one workspace: a row per block, kept in tiles so that it grows without
copying and is scored tile by tile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvws.recall.device_rows import DeviceRows
from kvws.recall.runs import RunIndex
from kvws.recall.signals.content import Content
from kvws.recall.signals.enabled import EnabledSignals
from kvws.recall.signals.signal import Part, Query, Tile

TILE_BLOCKS = 2048
"""Blocks of a tile: some 25 MB of rows, whose memory is taken as they are written. With smaller
ones, scoring blocks that are scattered over a long session would take an eighth more time."""

_Parts = list[tuple[torch.Tensor, ...]]
"""By signal: tensors, each [*before, TILE_BLOCKS, *after]."""


class BlockIndex:
    """Rows of the blocks of a workspace on one rank; row = block number.

    Rows that were never written are absent: they are no candidates, whatever the caller asks.
    """

    def __init__(self, signals: EnabledSignals, near: DeviceRows | None = None) -> None:
        """`near`: of the same signals; where rows are scored as long as they all fit in there."""
        self._signals = signals
        self._near = near
        self._near_owner = near.new_owner() if near is not None else 0
        self._tiles: list[_Parts] = []
        self._present: list[torch.Tensor] = []
        self._content = next(
            (n for n, each in enumerate(signals.signals) if isinstance(each, Content)), None
        )
        self._runs: RunIndex | None = None
        if self._content is not None:
            content = signals.signals[self._content]
            assert isinstance(content, Content)
            self._runs = RunIndex(content, TILE_BLOCKS)

    @property
    def nbytes(self) -> int:
        of_runs = self._runs.nbytes if self._runs is not None else 0
        tiles = sum(part.nbytes for tile in self._tiles for parts in tile for part in parts)
        return tiles + of_runs

    @property
    def rows(self) -> int:
        """Number of blocks with a row."""
        return sum(int(present.sum()) for present in self._present)

    def __contains__(self, block: int) -> bool:
        """Whether a block has a row."""
        tile, row = divmod(block, TILE_BLOCKS)
        return tile < len(self._tiles) and bool(self._present[tile][row])

    def write(self, blocks: Sequence[int], rows: torch.Tensor) -> None:
        """Set the rows of distinct blocks. `rows`: [blocks, row_bytes] uint8, as the signals make
        them."""
        parts_of_rows = self._signals.parts(rows)
        for begin, end in _stretches(blocks):
            tile, row = divmod(blocks[begin], TILE_BLOCKS)
            while tile >= len(self._tiles):
                self._tiles.append(self._new_tile())
                self._present.append(torch.zeros(TILE_BLOCKS, dtype=torch.bool))
            for signal, parts, given in zip(
                self._signals.signals, self._tiles[tile], parts_of_rows, strict=True
            ):
                for shape, part, values in zip(signal.parts, parts, given, strict=True):
                    target = _by_block(shape, part)[row : row + end - begin]
                    target.copy_(values[begin:end])
            self._present[tile][row : row + end - begin] = True
        if self._near is not None:
            self._near.forget(self._near_owner, blocks)
        if self._runs is not None:
            self._runs.note_written(blocks)

    def release(self) -> None:
        """Give up what it takes of an accelerator's memory; it is not asked any more."""
        if self._near is not None:
            self._near.forget_owner(self._near_owner)

    def _new_tile(self) -> _Parts:
        return [
            tuple(
                torch.zeros((*part.before, TILE_BLOCKS, *part.after), dtype=part.dtype)
                for part in signal.parts
            )
            for signal in self._signals.signals
        ]

    def read(self, block: int) -> torch.Tensor | None:
        """A block's row, [row_bytes] uint8, a copy; None when absent."""
        if block not in self:
            return None
        tile, row = divmod(block, TILE_BLOCKS)
        found = torch.zeros(self._signals.row_bytes, dtype=torch.uint8)
        begin = 0
        for signal, parts in zip(self._signals.signals, self._tiles[tile], strict=True):
            for shape, part in zip(signal.parts, parts, strict=True):
                values = _by_block(shape, part)[row].contiguous()
                found[begin : begin + shape.row_bytes] = values.view(-1).view(torch.uint8)
                begin += shape.row_bytes
        return found

    def score(
        self,
        queries: torch.Tensor,
        first_positions: torch.Tensor,
        query_first: int,
        candidates: torch.Tensor,
        content_rows: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """How much a query wants each block, by every signal, summed over this rank's heads.

        Args:
            queries: raw Q [layers, tokens, query_heads, head_dim] float32.
            first_positions: [blocks] int64: position of each block's first token in its line.
            query_first: position of the query's first token in the line that it continues.
            candidates: [blocks] bool; sink, recent and view-only blocks are False.
            content_rows: [tokens] bool, as in `Query`; None for all.

        Returns:
            by signal: [blocks] float32, 0 where a block is no candidate or absent.
        """
        query = Query(queries, query_first, content_rows)
        asked = self._asked_tiles(candidates)
        if self._near is not None:
            wanted = _numbers(asked)
            if 0 < len(wanted) <= self._near.capacity_blocks:
                return self._score_near(self._near, query, wanted, first_positions)
        there = torch.zeros(candidates.numel(), dtype=torch.bool)
        for tile in asked:
            there[tile.blocks] = True
        scores: dict[str, torch.Tensor] = {}
        for place, signal in enumerate(self._signals.signals):
            scores[signal.name] = of_blocks = torch.zeros(candidates.numel())
            if asked:
                tiles = [self._tile(place, tile, first_positions) for tile in asked]
                of_blocks[there] = signal.score(query, tiles)
        return scores

    def _score_near(
        self,
        near: DeviceRows,
        query: Query,
        wanted: torch.Tensor,
        first_positions: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        found = near.score(
            self._near_owner, query, wanted, first_positions[wanted], self._parts_of
        )
        scores = {name: torch.zeros(len(first_positions)) for name in found}
        for name, of_wanted in found.items():
            scores[name][wanted] = of_wanted
        return scores

    def score_runs(
        self, queries: torch.Tensor, content_rows: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """How much a query wants each run of blocks: which of them are worth `score`.

        Args:
            queries, content_rows: as for `score`.

        Returns:
            [runs] float32, 0 where no block is; None without the signal `content`.
        """
        if self._runs is None:
            return None
        return self._runs.score(
            Query(queries, 0, content_rows), self._content_rows_of, self._near
        )

    def _content_rows_of(
        self, tile: int, rows: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Some rows of a tile, as the signal `content` makes them, and which of them are there."""
        place = self._content
        assert place is not None
        shapes = self._signals.signals[place].parts
        parts = tuple(
            _by_block(shape, part)[rows]
            for shape, part in zip(shapes, self._tiles[tile][place], strict=True)
        )
        return parts, self._present[tile][rows]

    def _parts_of(self, blocks: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """Each signal's parts of blocks, [n] int64 ascending: copies, [*before, n, *after]."""
        in_tiles = blocks // TILE_BLOCKS
        runs = [
            (tile, blocks[in_tiles == tile] - tile * TILE_BLOCKS)
            for tile in range(int(in_tiles[0]), int(in_tiles[-1]) + 1)
            if bool((in_tiles == tile).any())
        ]
        of_signals: list[tuple[torch.Tensor, ...]] = []
        for place, signal in enumerate(self._signals.signals):
            parts: list[torch.Tensor] = []
            for number, shape in enumerate(signal.parts):
                axis = len(shape.before)
                copies = [
                    self._tiles[tile][place][number].index_select(axis, some)
                    for tile, some in runs
                ]
                parts.append(torch.cat(copies, dim=axis) if len(copies) > 1 else copies[0])
            of_signals.append(tuple(parts))
        return of_signals

    def _asked_tiles(self, candidates: torch.Tensor) -> list[_AskedTile]:
        """The tiles with candidates; the last one as far as blocks are asked for."""
        present = list(self._present)  # of each a tile is there, also while others write
        asked: list[_AskedTile] = []
        for number, of_tile in enumerate(torch.split(candidates, TILE_BLOCKS)[: len(present)]):
            if bool(of_tile.any()):
                begin = number * TILE_BLOCKS
                blocks = slice(begin, begin + of_tile.numel())
                mask = of_tile & present[number][: of_tile.numel()]
                asked.append(_AskedTile(number, blocks, mask))
        return asked

    def _tile(self, signal: int, asked: _AskedTile, first_positions: torch.Tensor) -> Tile:
        """One signal's share of a tile."""
        parts, count = self._tiles[asked.number][signal], asked.candidates.numel()
        if count < TILE_BLOCKS:
            shapes = self._signals.signals[signal].parts
            parts = tuple(
                part.narrow(len(shape.before), 0, count)
                for shape, part in zip(shapes, parts, strict=True)
            )
        return Tile(parts, asked.candidates, first_positions[asked.blocks])


@dataclass(frozen=True)
class _AskedTile:
    """A tile that has candidates.

    Attributes:
        blocks: numbers of its blocks.
        candidates: [blocks] bool: those with a row.
    """

    number: int
    blocks: slice
    candidates: torch.Tensor


def _numbers(asked: Sequence[_AskedTile]) -> torch.Tensor:
    """The candidates of tiles: [n] int64, ascending."""
    found = [tile.candidates.nonzero().flatten() + tile.blocks.start for tile in asked]
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)


def _stretches(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Places (begin, end) of consecutive blocks within one tile."""
    begin = 0
    for end in range(1, len(blocks) + 1):
        if (
            end == len(blocks)
            or blocks[end] != blocks[end - 1] + 1
            or blocks[end] % TILE_BLOCKS == 0
        ):
            yield begin, end
            begin = end


def _by_block(shape: Part, part: torch.Tensor) -> torch.Tensor:
    """A tile's part as [TILE_BLOCKS, *before, *after], a view."""
    return part.movedim(len(shape.before), 0)
