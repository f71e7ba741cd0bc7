"""Mean-K scores in torch: the specification of the operation, and its CPU implementation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

LOGITS_BYTES = 4 << 20
"""Logits held at a time, whatever the number of query tokens and blocks."""


@torch.no_grad()
def mean_k_scores(
    queries: torch.Tensor, tiles: Sequence[torch.Tensor], candidates: Sequence[torch.Tensor]
) -> torch.Tensor:
    """See the API. One layer at a time, candidate blocks only.

    A row is one query token of one query head. With a single tile its softmax is final at once;
    with several the normaliser Σ exp of every row is gathered over all tiles first, and the
    logits are computed a second time rather than kept.
    """
    chosen = [mask.nonzero().flatten() for mask in candidates]
    used = [i for i, blocks in enumerate(chosen) if blocks.numel()]
    sums = [torch.zeros(c.numel(), dtype=torch.float32, device=c.device) for c in chosen]
    for layer in range(queries.shape[0]):
        rows = _rows(queries[layer], tiles[0].shape[1])
        if len(used) == 1:
            (i,) = used
            for _, logits in _logits(rows, _keys(tiles[i][layer], chosen[i])):
                sums[i] += logits.softmax(dim=2).sum(dim=(0, 1))
            continue
        # [kv_heads, group·tokens, 1]: log Σ exp over the tiles seen so far
        normaliser = rows.new_full((*rows.shape[:2], 1), -torch.inf)
        for i in used:
            for span, logits in _logits(rows, _keys(tiles[i][layer], chosen[i])):
                part = logits.logsumexp(dim=2, keepdim=True)
                normaliser[:, span] = torch.logaddexp(normaliser[:, span], part)
        for i in used:
            for span, logits in _logits(rows, _keys(tiles[i][layer], chosen[i])):
                sums[i] += logits.sub_(normaliser[:, span]).exp_().sum(dim=(0, 1))
    scores = [
        torch.zeros(mask.numel(), dtype=torch.float32, device=mask.device).index_copy_(0, c, s)
        for mask, c, s in zip(candidates, chosen, sums, strict=True)
    ]
    return torch.cat(scores)


def _rows(queries: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[tokens, query_heads, d] to scaled rows [kv_heads, group·tokens, d]."""
    scaled = queries * queries.shape[2] ** -0.5
    grouped = scaled.unflatten(1, (kv_heads, -1))  # [tokens, kv_heads, group, d]
    return grouped.permute(1, 2, 0, 3).flatten(1, 2)


def _keys(tile: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """The chosen blocks of one layer's tile: [kv_heads, len(blocks), d] float32."""
    if blocks.numel() < tile.shape[1]:
        tile = tile.index_select(1, blocks)
    return tile.float()


def _logits(rows: torch.Tensor, keys: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Spans of rows with their logits [kv_heads, span, blocks], within LOGITS_BYTES each."""
    step = max(1, LOGITS_BYTES // (4 * keys.shape[0] * keys.shape[1]))
    for start in range(0, rows.shape[1], step):
        span = slice(start, start + step)
        yield span, torch.bmm(rows[:, span], keys.transpose(1, 2))
