"""The candidate blocks of an index that comes in tiles, without a copy of the index."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

PIECE_BLOCKS = 512
"""Blocks of a piece at most. A copy of one is small, whatever the size of a tile."""


@dataclass(frozen=True)
class Piece:
    """Some candidates of one tile.

    Attributes:
        tile: its number.
        blocks: their places in the tile, ascending: [n] int64, or a slice where none between them
            is left out.
        count: n.
    """

    tile: int
    blocks: torch.Tensor | slice
    count: int

    def of(self, part: torch.Tensor, axis: int) -> torch.Tensor:
        """What one of the tile's tensors, with its blocks along `axis`, holds of them: a view
        where they are a slice, a copy elsewhere."""
        if isinstance(self.blocks, slice):
            return part.narrow(axis, self.blocks.start, self.count)
        return part.index_select(axis, self.blocks)


def places(candidates: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Where each mask is True: [n] int64 each. Waits for a GPU once, however many masks.

    Args:
        candidates: [tile_blocks] bool each, on one device.
    """
    if not candidates:
        return []
    everywhere = torch.cat(list(candidates)).nonzero().flatten()
    begins = [0]
    for mask in candidates:
        begins.append(begins[-1] + mask.numel())
    bounds = torch.tensor(begins, device=everywhere.device)
    cuts = [int(cut) for cut in torch.searchsorted(everywhere, bounds).cpu()]
    return [
        everywhere[first:last] - begin
        for first, last, begin in zip(cuts, cuts[1:], begins, strict=False)
    ]


def pieces(candidates: Sequence[torch.Tensor]) -> list[Piece]:
    """All candidates in pieces, in order. For masks in CPU memory."""
    found: list[Piece] = []
    for tile, blocks in enumerate(places(candidates)):
        for some in torch.split(blocks, PIECE_BLOCKS) if blocks.numel() else ():
            first, last = int(some[0]), int(some[-1])
            unbroken = last - first + 1 == some.numel()
            span = slice(first, last + 1) if unbroken else some
            found.append(Piece(tile, span, some.numel()))
    return found


def chunks(pieces: Sequence[Piece], most_blocks: int) -> list[list[Piece]]:
    """Pieces in runs of `most_blocks` blocks at most; a piece that is larger is a run alone."""
    runs: list[list[Piece]] = []
    blocks = 0
    for piece in pieces:
        if not runs or blocks + piece.count > most_blocks:
            runs.append([])
            blocks = 0
        runs[-1].append(piece)
        blocks += piece.count
    return runs


def stretches(
    tiles: Sequence[Sequence[torch.Tensor]], pieces: Sequence[Piece], axis: int
) -> Iterator[tuple[torch.Tensor, ...]]:
    """The tiles' tensors at the pieces' blocks, in order, about PIECE_BLOCKS blocks or fewer at
    a time: candidates that lie scattered over many tiles are put together, so that what follows
    is not paid tile by tile.

    Args:
        tiles: the tensors of each tile, with their blocks along `axis`.
    """
    for run in chunks(pieces, PIECE_BLOCKS):
        parts = zip(*(_parts(tiles[piece.tile], piece, axis) for piece in run), strict=True)
        yield tuple(part[0] if len(part) == 1 else torch.cat(part, dim=axis) for part in parts)


def together(
    tiles: Sequence[tuple[torch.Tensor, ...]],
    pieces: Sequence[Piece],
    axis: int,
    most_bytes: int,
) -> tuple[Sequence[tuple[torch.Tensor, ...]], Sequence[Piece]]:
    """Tiles and pieces with the same candidates in the same order, quicker to go through again and
    again: a copy of the candidates alone where they are few of many tiles and the copy takes no
    more than `most_bytes`; else those given."""
    blocks = sum(piece.count for piece in pieces)
    if blocks == 0 or blocks > len(pieces) * PIECE_BLOCKS // 4:
        return tiles, pieces
    first = tiles[pieces[0].tile]
    block_bytes = sum(part.nbytes // part.shape[axis] for part in first)
    if blocks * block_bytes > most_bytes:
        return tiles, pieces
    copied = list(stretches(tiles, pieces, axis))
    counts = [parts[0].shape[axis] for parts in copied]
    return copied, [Piece(n, slice(0, count), count) for n, count in enumerate(counts)]


def _parts(tile: Sequence[torch.Tensor], piece: Piece, axis: int) -> tuple[torch.Tensor, ...]:
    return tuple(piece.of(part, axis) for part in tile)


def spread(candidates: Sequence[torch.Tensor], of_candidates: torch.Tensor) -> torch.Tensor:
    """One value per candidate, in order, to one per block of all tiles: 0 elsewhere."""
    everywhere = torch.cat(list(candidates))
    scores = of_candidates.new_zeros(everywhere.numel())
    scores[everywhere] = of_candidates
    return scores


def check_candidates(
    tile_blocks: Sequence[Sequence[int]], candidates: Sequence[torch.Tensor]
) -> None:
    """Raises ValueError unless there is one bool per block, and one mask per tile.

    Args:
        tile_blocks: of each tile, as a shape of one dimension.
    """
    if len(tile_blocks) != len(candidates):
        raise ValueError(
            f"candidates must have one mask per tile: expected {len(tile_blocks)}, "
            f"got {len(candidates)}"
        )
    for number, (blocks, mask) in enumerate(zip(tile_blocks, candidates, strict=True)):
        if mask.shape != tuple(blocks) or mask.dtype != torch.bool:
            raise ValueError(
                f"candidates[{number}] must be one bool per block: expected {tuple(blocks)} "
                f"torch.bool, got {tuple(mask.shape)} {mask.dtype}"
            )
