"""Rotated scores in torch: the specification of the operation, and its CPU implementation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvws.kernels.candidates import Piece, chunks, pieces, spread, stretches
from kvws.kernels.rotary import RotaryTable, Rotation, pairs, rotation_between
from kvws.kernels.rotated_scores.sides import query_rows, turns

KEYS_BYTES = 48 << 20
"""fp32 keys of one layer held at a time."""

LOGITS_BYTES = 8 << 20
"""Logits held at a time, whatever the number of query tokens, except for what follows."""

ROWS_MIN = 32
"""Rows of a product at least: with fewer, reading the keys again for the next ones would cost more
than the products."""

COPIES_BYTES = 128 << 20
"""Rows of scattered candidates held at a time, of as many layers as fit."""

_Parts = tuple[torch.Tensor, ...]
"""Means and variances of a tile, each [layers, kv_heads, blocks, …]."""


@torch.no_grad()
def rotated_scores(
    queries: torch.Tensor,
    offsets: torch.Tensor,
    tiles: Sequence[_Parts],
    candidates: Sequence[torch.Tensor],
    distances: Sequence[torch.Tensor],
    rotary: Sequence[RotaryTable],
) -> torch.Tensor:
    """See the API.

    Candidates come in chunks that bound the memory. With one chunk a row's softmax is final at
    once; with several the normaliser Σ exp of every row is gathered over all chunks first, and
    the logits are computed a second time rather than kept.
    """
    found = pieces(candidates)
    if not found:
        return spread(candidates, queries.new_zeros(0))
    layers, kv_heads, _, head_dim = tiles[0][0].shape
    wide = head_dim + tiles[0][1].shape[3]
    away = torch.cat([piece.of(distances[piece.tile], 0) for piece in found])
    tables = {id(table): table for table in rotary}
    by_distance = {key: turns(table, away) for key, table in tables.items()}
    to_offsets = {key: rotation_between(table, None, offsets) for key, table in tables.items()}
    runs = _runs(found, away, max(1, KEYS_BYTES // (4 * kv_heads * wide)))
    blocks = max(len(run.distances) for run in runs)
    keys = queries.new_empty((kv_heads, blocks, wide))
    together = max(1, COPIES_BYTES // (blocks * kv_heads * wide * tiles[0][0].element_size()))
    sums = queries.new_zeros(len(away))
    for first in range(0, layers, together):
        group = slice(first, first + together)
        some = _Layers(
            [
                query_rows(of_layer, to_offsets[id(table)], kv_heads)
                for of_layer, table in zip(queries[group], rotary[group], strict=True)
            ],
            [by_distance[id(table)] for table in rotary[group]],
            [tuple(part[group] for part in parts) for parts in tiles],
        )
        if len(runs) == 1:
            for _, _, logits in some.logits(runs[0], keys):
                sums += logits.softmax(dim=2).sum(dim=(0, 1))
            continue
        # log Σ exp over the chunks seen so far, by layer: [kv_heads, rows, 1]
        normalisers = [rows.new_full((*rows.shape[:2], 1), -torch.inf) for rows in some.rows]
        for run in runs:
            for layer, span, logits in some.logits(run, keys):
                seen = normalisers[layer][:, span]
                torch.logaddexp(seen, logits.logsumexp(dim=2, keepdim=True), out=seen)
        for run in runs:
            for layer, span, logits in some.logits(run, keys):
                masses = logits.sub_(normalisers[layer][:, span]).exp_()
                sums[run.span] += masses.sum(dim=(0, 1))
    return spread(candidates, sums)


@dataclass(frozen=True)
class _Run:
    """A chunk of the candidates.

    Attributes:
        span: where they are among all candidates.
        distances: [blocks] int64.
    """

    pieces: list[Piece]
    span: slice
    distances: torch.Tensor


def _runs(found: Sequence[Piece], away: torch.Tensor, most_blocks: int) -> list[_Run]:
    runs: list[_Run] = []
    begin = 0
    for some in chunks(found, most_blocks):
        span = slice(begin, begin + sum(piece.count for piece in some))
        runs.append(_Run(some, span, away[span]))
        begin = span.stop
    return runs


@dataclass(frozen=True)
class _Layers:
    """Some layers, and what they need.

    Attributes:
        rows: of each layer, as `query_rows` makes them.
        rotations: of each layer, by distance.
        tiles: their share of each tile.
    """

    rows: list[torch.Tensor]
    rotations: list[Rotation]
    tiles: list[_Parts]

    def logits(self, run: _Run, keys: torch.Tensor) -> Iterator[tuple[int, slice, torch.Tensor]]:
        """Layers and spans of their rows with their logits, [kv_heads, span, blocks].

        Mutates: `keys`, scratch of [kv_heads, blocks at least, head_dim + pairs].
        """
        parts_of_run = list(stretches(self.tiles, run.pieces, 2))
        for layer, (rows, rotation) in enumerate(zip(self.rows, self.rotations, strict=True)):
            begin = 0
            for means, variances in parts_of_run:
                end = begin + means.shape[2]
                _write_keys(
                    means[layer], variances[layer], rotation, run.distances[begin:end],
                    keys[:, begin:end],
                )  # fmt: skip
                begin = end
            columns = keys[:, :begin].transpose(1, 2)
            step = max(ROWS_MIN, LOGITS_BYTES // (4 * len(rows) * begin))
            for start in range(0, rows.shape[1], step):
                span = slice(start, start + step)
                yield layer, span, torch.bmm(rows[:, span], columns)


def _write_keys(
    means: torch.Tensor,
    variances: torch.Tensor,
    rotation: Rotation,
    distances: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Means at their distance, and variances.

    Mutates: all of `out`, [kv_heads, blocks, head_dim + pairs] float32.
    """
    head_dim, rotary_dim = means.shape[2], rotation.rotary_dim
    cos, sin = rotation.cos.index_select(0, distances), rotation.sin.index_select(0, distances)
    still = means.float()
    turned = out[..., :head_dim]
    a, b = pairs(still, rotary_dim, rotation.interleaved)
    out_a, out_b = pairs(turned, rotary_dim, rotation.interleaved)
    torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=out_b).addcmul_(a, sin)
    turned[..., rotary_dim:] = still[..., rotary_dim:]
    out[..., head_dim:] = variances
