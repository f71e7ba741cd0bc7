"""`rotated-mean`: what attention would see, from the mean and spread of a block's rotated keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvws.blocks.key import BLOCK_TOKENS
from kvws.kernels.mean_k import mean_rotated
from kvws.kernels.rerope import rotate
from kvws.kernels.rotary import RotaryTable, Rotation, pairs, rotation_between
from kvws.recall.signals.signal import BlockKeys, Part, Query, Tile, norms, spread, to_half

CAP_TOKENS = 2048
"""Blocks farther away than this are scored as if they were so far: nothing is scored beyond the
distances that a view can have."""

_VARIANCE_WEIGHT = 0.25
"""Half the variance of the logits is the second term of log-mean-exp; a pair whose phases are
spread evenly gives half of |q|²·var to it."""

_LOGITS_BYTES = 16 << 20
"""Logits held at a time, whatever the number of query tokens and blocks."""


@dataclass(frozen=True)
class _LayerTile:
    """One layer of a tile's candidates: means [kv_heads, blocks, head_dim], variances [kv_heads,
    blocks, pairs], and the rotation that takes each block to its distance."""

    means: torch.Tensor
    variances: torch.Tensor
    rotation: Rotation

    def keys(self) -> torch.Tensor:
        """[kv_heads, blocks, head_dim + pairs] float32: means at their distance, variances."""
        rotation, head_dim = self.rotation, self.means.shape[2]
        means = self.means.float()
        keys = means.new_empty((*means.shape[:2], head_dim + self.variances.shape[2]))
        turned, rotary_dim = keys[..., :head_dim], rotation.rotary_dim
        a, b = pairs(means, rotary_dim, rotation.interleaved)
        out_a, out_b = pairs(turned, rotary_dim, rotation.interleaved)
        torch.mul(a, rotation.cos, out=out_a).addcmul_(b, rotation.sin, value=-1)
        torch.mul(b, rotation.cos, out=out_b).addcmul_(a, rotation.sin)
        turned[..., rotary_dim:] = means[..., rotary_dim:]
        keys[..., head_dim:] = self.variances
        return keys


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

    then a softmax over the candidates, summed over layers, query heads and tokens.

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
        query_tokens: int | None = None,
    ) -> None:
        """
        Args:
            layers: those it reads, ascending; at least one.
            kv_heads: of this rank.
            rotary: the table of every layer of the model; those of the chosen layers rotate
                equally many dimensions.
            cap_tokens: the largest distance that is told apart.
            query_tokens: so many of the query's last tokens count; all when None.
        """
        self._layers = tuple(layers)
        self._rotary = rotary
        self._cap_tokens = cap_tokens
        self._query_tokens = query_tokens
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
        blocks = sum(int(tile.candidates.sum()) for tile in tiles)
        sums = torch.zeros(blocks, dtype=torch.float32, device=query.heads.device)
        if blocks == 0 or query.heads.numel() == 0:
            return spread(tiles, sums)
        used = [tile for tile in tiles if bool(tile.candidates.any())]
        rotations: dict[int, list[Rotation]] = {}  # layers usually share one table
        for place, layer in enumerate(self._layers):
            table = self._rotary[layer]
            if id(table) not in rotations:
                rotations[id(table)] = [self._to_distance(tile, query, table) for tile in used]
            layer_tiles = [
                _LayerTile(
                    tile.chosen(tile.parts[0][place], 1),
                    tile.chosen(tile.parts[1][place], 1),
                    rotation,
                )
                for tile, rotation in zip(used, rotations[id(table)], strict=True)
            ]
            for logits in _logits(self._query_rows(query, layer), layer_tiles, blocks):
                sums += logits.softmax(dim=2).sum(dim=(0, 1))
        return spread(tiles, sums)

    def _to_distance(self, tile: Tile, query: Query, table: RotaryTable) -> Rotation:
        """Of each candidate: by −D, which only shifts the block, so its size stays."""
        farthest = min(self._cap_tokens, table.max_position - 1)
        distance = query.first_position - tile.chosen(tile.first_positions, 0)
        distance = distance.clamp(min=BLOCK_TOKENS).clamp(max=farthest)
        return rotation_between(table, distance, torch.zeros_like(distance))

    def _query_rows(self, query: Query, layer: int) -> torch.Tensor:
        """[kv_heads, group·tokens, head_dim + pairs]: what a block's keys are multiplied by."""
        table, heads = self._rotary[layer], query.heads[layer]
        tokens, query_heads, head_dim = heads.shape
        counted = min(tokens, self._query_tokens or tokens)
        at = torch.arange(tokens - counted, tokens, device=heads.device)
        rotated = rotate(heads[tokens - counted :], rotation_between(table, None, at))
        a, b = pairs(rotated, table.rotary_dim, table.interleaved)
        energy = (a.square() + b.square()) * (_VARIANCE_WEIGHT / head_dim)
        rows = torch.cat([rotated * head_dim**-0.5, energy], dim=2)
        kv_heads = self.parts[0].before[1]
        grouped = rows.view(counted, kv_heads, query_heads // kv_heads, -1)
        return grouped.permute(1, 2, 0, 3).flatten(1, 2)


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


def _logits(
    rows: torch.Tensor, tiles: Sequence[_LayerTile], blocks: int
) -> Iterator[torch.Tensor]:
    """Logits [kv_heads, some rows, blocks of all tiles], within _LOGITS_BYTES each.

    They lie in one buffer: they are good until the next are asked for.
    """
    kv_heads, count, _ = rows.shape
    step = min(count, max(1, _LOGITS_BYTES // (4 * kv_heads * blocks)))
    buffer = rows.new_empty((kv_heads, step, blocks))
    for start in range(0, count, step):
        some = rows[:, start : start + step]
        logits, begin = buffer[:, : some.shape[1]], 0
        for tile in tiles:
            keys = tile.keys()
            logits[:, :, begin : begin + keys.shape[1]] = torch.bmm(some, keys.transpose(1, 2))
            begin += keys.shape[1]
        yield logits
