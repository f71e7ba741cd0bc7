"""Mean-K scores in torch: the specification of the operation, and its CPU implementation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kvws.kernels.candidates import Piece, pieces, spread, together

LOGITS_BYTES = 4 << 20
"""Logits held at a time, whatever the number of query tokens and blocks."""

COPIES_BYTES = 128 << 20
"""Means of scattered candidates, copied once rather than at every reading."""


@torch.no_grad()
def mean_k_scores(
    queries: torch.Tensor, tiles: Sequence[torch.Tensor], candidates: Sequence[torch.Tensor]
) -> torch.Tensor:
    """See the API. One layer at a time, candidate blocks only.

    A row is one query token of one query head. With a single piece of candidates its softmax is
    final at once; with several the normaliser Σ exp of every row is gathered over all pieces
    first, and the logits are computed a second time rather than kept.
    """
    parts, found = together([(tile,) for tile in tiles], pieces(candidates), 2, COPIES_BYTES)
    counts = [piece.count for piece in found]
    of_candidates = torch.zeros(sum(counts), dtype=torch.float32, device=queries.device)
    sums = torch.split(of_candidates, counts)
    for layer in range(queries.shape[0]):
        rows = _rows(queries[layer], tiles[0].shape[1])
        of_layer = [tile[layer] for (tile,) in parts]
        if len(found) == 1:
            for _, logits in _logits(rows, _keys(of_layer, found[0])):
                sums[0].add_(logits.softmax(dim=2).sum(dim=(0, 1)))
            continue
        # [kv_heads, group·tokens, 1]: log Σ exp over the pieces seen so far
        normaliser = rows.new_full((*rows.shape[:2], 1), -torch.inf)
        for piece in found:
            for span, logits in _logits(rows, _keys(of_layer, piece)):
                part = logits.logsumexp(dim=2, keepdim=True)
                normaliser[:, span] = torch.logaddexp(normaliser[:, span], part)
        for piece, sum_of_piece in zip(found, sums, strict=True):
            for span, logits in _logits(rows, _keys(of_layer, piece)):
                masses = logits.sub_(normaliser[:, span]).exp_()
                sum_of_piece.add_(masses.sum(dim=(0, 1)))
    return spread(candidates, of_candidates)


def _rows(queries: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[tokens, query_heads, d] to scaled rows [kv_heads, group·tokens, d]."""
    scaled = queries * queries.shape[2] ** -0.5
    grouped = scaled.unflatten(1, (kv_heads, -1))  # [tokens, kv_heads, group, d]
    return grouped.permute(1, 2, 0, 3).flatten(1, 2)


def _keys(tiles: Sequence[torch.Tensor], piece: Piece) -> torch.Tensor:
    """A piece's blocks of one layer: [kv_heads, blocks, d] float32."""
    return piece.of(tiles[piece.tile], 1).float()


def _logits(rows: torch.Tensor, keys: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Spans of rows with their logits [kv_heads, span, blocks], within LOGITS_BYTES each."""
    step = max(1, LOGITS_BYTES // (4 * keys.shape[0] * keys.shape[1]))
    for start in range(0, rows.shape[1], step):
        span = slice(start, start + step)
        yield span, torch.bmm(rows[:, span], keys.transpose(1, 2))
