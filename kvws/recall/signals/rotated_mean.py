"""`rotated-mean`: what attention would see, from the mean and spread of a block's rotated keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvws.blocks.key import BLOCK_TOKENS
from kvws.kernels.mean_k import mean_rotated
from kvws.kernels.rotary import RotaryTable, Rotation, pairs, tables_on
from kvws.kernels.rotated_scores import rotated_scores
from kvws.recall.signals.signal import (
    BlockKeys,
    Part,
    Query,
    Tile,
    asking_tokens,
    device_of,
    norms,
    to_half,
)

CAP_TOKENS = 2048
"""Blocks farther away than this are scored as if they were so far: nothing is scored beyond the
distances that a view can have."""


ASKING_TOKENS = 32
"""Of a query count for it. The sum over tokens hardly changes with four times as many, and each
costs as much as the others."""


def default_rotated_layers(layers: int) -> tuple[int, ...]:
    """Every fourth of the first two thirds of a model's layers, and every second of the last.

    As good as all of them together, at a third of their cost; the last third, which reads more of
    what the query asks, needs more than its share.
    """
    last_third = -(-2 * layers // 3)
    return (*range(0, last_third, 4), *range(last_third, layers, 2))


class RotatedMean:
    """Mean of R(i)·k_i over a block's tokens i, and the variance of each rotary pair around it, in
    some layers.

    Rotated to the block's distance, the mean gives the mean of the block's true logits whatever
    position it stands at; the variance tells how far its best token rises above that. Dimensions
    that rotary encoding passes through are in the mean and have no variance.

    Score of block b for query token t of a query head, with distance D = first position of the
    query − that of the block, at least a block and at most `cap_tokens`:

        ⟨R(t)·q_t, R(−D)·mean_b⟩/√d + ¼·Σ_pairs |q_t|²·var_b/d

    then a softmax over the candidates, summed over layers, query heads and the tokens that count
    (`asking_tokens`). R(−D) only shifts a block, so its size stays.

    A row is layers·kv_heads·(head_dim + rotary_dim/2) float16, 2 bytes each, of the chosen layers
    alone.
    """

    name = "rotated-mean"

    def __init__(
        self,
        layers: Sequence[int],
        kv_heads: int,
        head_dim: int,
        rotary: Sequence[RotaryTable],
        *,
        cap_tokens: int = CAP_TOKENS,
        most_asking: int = ASKING_TOKENS,
    ) -> None:
        """
        Args:
            layers: those it reads, ascending; at least one.
            kv_heads: of this rank.
            rotary: the table of every layer of the model; those of the chosen layers rotate
                equally many dimensions.
            cap_tokens: the largest distance that is told apart.
            most_asking: so many of the query's tokens count, as `asking_tokens` says.
        """
        self._layers = tuple(layers)
        self._rotary = rotary
        self._tables_on: dict[torch.device, list[RotaryTable]] = {}
        self._cap_tokens = cap_tokens
        self._most_asking = most_asking
        pair_counts = {rotary[layer].rotary_dim // 2 for layer in layers}
        assert len(pair_counts) == 1, f"layers rotate {pair_counts} pairs"
        before = (len(self._layers), kv_heads)
        self.parts = (
            Part(torch.float16, before, (head_dim,)),
            Part(torch.float16, before, (pair_counts.pop(),)),
        )
        self.row_format = "rotated-mean/f16/" + "+".join(map(str, self._layers))

    def rows(self, keys: BlockKeys) -> tuple[torch.Tensor, ...]:
        means, variances = (
            torch.empty((keys.blocks, *part.before, *part.after), dtype=part.dtype)
            for part in self.parts
        )
        for place, layer in enumerate(self._layers):
            k, rotation = keys.of_layer(layer), keys.to_offsets(layer)
            mean = mean_rotated(k, rotation)
            means[:, place] = to_half(mean)
            variances[:, place] = to_half(_pair_variances(k, mean, rotation))
        return means, variances

    def importance(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return norms(parts[0])

    def score(self, query: Query, tiles: Sequence[Tile]) -> torch.Tensor:
        places = asking_tokens(query.heads.shape[1], self._most_asking)
        asking = torch.tensor(places, dtype=torch.int64)
        device = device_of(tiles, query.heads)
        rotary = self._tables(device)
        farthest = min(self._cap_tokens, *(table.max_position - 1 for table in rotary))
        return rotated_scores(
            query.heads[list(self._layers)][:, asking].to(device),
            asking.to(device),
            [tile.parts for tile in tiles],
            [tile.candidates for tile in tiles],
            [
                (query.first_position - tile.first_positions)
                .clamp_(min=BLOCK_TOKENS)
                .clamp_(max=farthest)
                for tile in tiles
            ],
            rotary,
        )

    def _tables(self, device: torch.device) -> list[RotaryTable]:
        """Those of the chosen layers, on a device."""
        if device not in self._tables_on:
            of_layers = [self._rotary[layer] for layer in self._layers]
            self._tables_on[device] = tables_on(of_layers, device)
        return self._tables_on[device]


def _pair_variances(k: torch.Tensor, mean: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Variance of each rotated pair around its mean.

    Args:
        k: [blocks, BLOCK_TOKENS, kv_heads, head_dim].
        mean: of the rotated keys, [blocks, kv_heads, head_dim] float32.
        rotation: of all tokens.

    Returns:
        [blocks, kv_heads, pairs] float32, not negative.
    """
    rotary_dim, interleaved = rotation.rotary_dim, rotation.interleaved
    a, b = pairs(k[..., :rotary_dim].float(), rotary_dim, interleaved)
    growth = (rotation.cos.square() + rotation.sin.square()).view(*k.shape[:2], 1, -1)
    energy = ((a.square() + b.square()) * growth).mean(dim=1)
    a, b = pairs(mean, rotary_dim, interleaved)
    return (energy - a.square() - b.square()).clamp_(min=0)
