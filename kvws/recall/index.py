"""The Mean-K index of one workspace: one vector per block, layer and KV head (KVMem, block
representation), kept in tiles so that it grows without copying and is scored tile by tile."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvws.kernels.score import mean_k_scores

TILE_BLOCKS = 512
"""Blocks of a tile. Scoring touches one layer of one tile at a time, so its extra memory does
not grow with the workspace."""


class MeanKIndex:
    """Mean of the raw K of every block of a workspace on one rank; row = block number.

    Rows that were never written are absent: they are no candidates, whatever the caller asks.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int) -> None:
        self._tile_shape = (layers, kv_heads, TILE_BLOCKS, head_dim)
        self._tiles: list[torch.Tensor] = []
        self._present: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        return sum(tile.nbytes for tile in self._tiles)

    @property
    def rows(self) -> int:
        """Number of blocks with a row."""
        return sum(int(present.sum()) for present in self._present)

    def write(self, blocks: Sequence[int], means: torch.Tensor) -> None:
        """Set the rows of distinct blocks. `means`: [blocks, layers, kv_heads, head_dim] float32.
        """
        begin = 0
        while begin < len(blocks):  # stretches of consecutive blocks within one tile
            tile, row = divmod(blocks[begin], TILE_BLOCKS)
            end = begin + 1
            while (
                end < len(blocks)
                and blocks[end] == blocks[end - 1] + 1
                and blocks[end] // TILE_BLOCKS == tile
            ):
                end += 1
            while tile >= len(self._tiles):
                self._tiles.append(torch.zeros(self._tile_shape))
                self._present.append(torch.zeros(TILE_BLOCKS, dtype=torch.bool))
            rows = slice(row, row + end - begin)
            self._tiles[tile][:, :, rows] = means[begin:end].permute(1, 2, 0, 3)
            self._present[tile][rows] = True
            begin = end

    def read(self, block: int) -> torch.Tensor | None:
        """A block's row [layers, kv_heads, head_dim], or None when absent."""
        tile, row = divmod(block, TILE_BLOCKS)
        if tile >= len(self._tiles) or not self._present[tile][row]:
            return None
        return self._tiles[tile][:, :, row]

    def score(self, queries: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Mean-K score of every block, summed over this rank's layers and heads.

        Args:
            queries: raw Q [layers, tokens, query_heads, head_dim] float32.
            candidates: [blocks] bool; sink, recent and view-only blocks are False.

        Returns:
            [blocks] float32, 0 where a block is no candidate or absent.
        """
        blocks = candidates.numel()
        tiles: list[torch.Tensor] = []
        masks: list[torch.Tensor] = []
        for number, (tile, present) in enumerate(zip(self._tiles, self._present, strict=True)):
            wanted = candidates[number * TILE_BLOCKS : (number + 1) * TILE_BLOCKS]
            if wanted.numel() == 0:
                break
            tiles.append(tile[:, :, : wanted.numel()])  # the last tile is scored as far as needed
            masks.append(wanted & present[: wanted.numel()])
        scores = torch.zeros(blocks)
        if tiles:
            scored = mean_k_scores(queries, tiles, masks)
            scores[: scored.numel()] = scored
        return scores
