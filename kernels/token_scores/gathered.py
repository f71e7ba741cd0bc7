"""Candidates of a tiled index, one KV head after another, for what multiplies in torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kvws.kernels.candidates import pieces, stretches, together

COPIES_BYTES = 64 << 20
"""Keys of scattered candidates, of all KV heads, copied once rather than at every reading."""


class Gathered:
    """The parts of some candidates.

    Attributes:
        count: of the candidates.
    """

    def __init__(
        self, tiles: Sequence[tuple[torch.Tensor, ...]], candidates: Sequence[torch.Tensor]
    ) -> None:
        """
        Args:
            tiles: the tensors of each, [kv_heads, tile_blocks, …].
            candidates: each [tile_blocks] bool.
        """
        self._tiles, self._pieces = together(tiles, pieces(candidates), 1, COPIES_BYTES)
        self.count = sum(piece.count for piece in self._pieces)

    def of_head(self, kv_head: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """The candidates in their order, in stretches: each part [blocks, …]."""
        tiles = [tuple(part[kv_head] for part in parts) for parts in self._tiles]
        return stretches(tiles, self._pieces, 0)
