"""`mean-k`: the published rule, the baseline that the other signals are measured against."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvws.kernels.mean_k import mean_rotated
from kvws.kernels.score import mean_k_scores
from kvws.recall.signals.signal import BlockKeys, Part, Query, Tile, device_of, norms, to_half


class MeanK:
    """Mean of a block's un-rotated K in every layer and KV head (KVMem, block representation).

    Score: per layer, query token and query head a softmax over the candidates of q·k̄/√d, summed
    (KVMem, R_b up to a factor of layers·query_heads).

    A row is layers·kv_heads·head_dim float16: 2 bytes each.
    """

    name = "mean-k"
    row_format = "mean-k/f16"

    def __init__(self, layers: int, kv_heads: int, head_dim: int) -> None:
        """`kv_heads`: of this rank."""
        self._layers = layers
        self.parts = (Part(torch.float16, (layers, kv_heads), (head_dim,)),)

    def rows(self, keys: BlockKeys) -> tuple[torch.Tensor, ...]:
        (part,) = self.parts
        means = torch.empty((keys.blocks, *part.before, *part.after), dtype=part.dtype)
        for layer in range(self._layers):
            means[:, layer] = to_half(mean_rotated(keys.of_layer(layer), keys.to_raw(layer)))
        return (means,)

    def importance(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return norms(parts[0])

    def score(self, query: Query, tiles: Sequence[Tile]) -> torch.Tensor:
        return mean_k_scores(
            query.heads.to(device_of(tiles, query.heads)),
            [tile.parts[0] for tile in tiles],
            [tile.candidates for tile in tiles],
        )
