"""`content`: token keys of the few heads that a calibration found to look for content."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from kvws.blocks.key import BLOCK_TOKENS
from kvws.kernels.rerope import rotate
from kvws.recall.profile import ContentKeys
from kvws.recall.signals.content_keys import content_parts, decode, encode
from kvws.recall.signals.signal import BlockKeys, Part, Query, Tile, norms, spread

_LOGITS_BYTES = 32 << 20
"""Logits of blocks held at a time, whatever the number of query tokens and blocks."""

_TOKEN_LOGITS_BYTES = 2 << 20
"""Logits of tokens held at a time: small enough to stay in cache until they are reduced."""


class Content:
    """Un-rotated keys of every token, quantised, in the KV heads that chosen query heads share.

    Score of a block for one query head: the largest q·k over its tokens, as a z-score over the
    candidates (of one query token; mean and deviation of all of them), the largest of that over
    the query's content rows; then summed over the query heads. Other heads would drown what these
    find, and so would the tokens of a chat template.

    A row is per KV head BLOCK_TOKENS·(2 + head_dim/2) bytes for int4, BLOCK_TOKENS·(2 + head_dim)
    for int8, 2·head_dim for means.
    """

    name = "content"

    def __init__(
        self,
        heads: Sequence[tuple[int, int]],
        *,
        group: int,
        head_dim: int,
        precision: ContentKeys,
    ) -> None:
        """
        Args:
            heads: (layer, query head) of this rank, counted from the rank's first; may be none.
            group: query heads that share a KV head.
        """
        self._precision: ContentKeys = precision
        self._query_heads: dict[tuple[int, int], list[int]] = {}
        for layer, head in sorted(heads):
            self._query_heads.setdefault((layer, head // group), []).append(head)
        self._kv_heads = list(self._query_heads)
        self._head_dim = head_dim
        self.parts: tuple[Part, ...] = content_parts(precision, len(self._kv_heads), head_dim)
        names = "+".join(f"{layer}.{head}" for layer, head in self._kv_heads)
        self.row_format = f"content/{precision}/{names}"

    def rows(self, keys: BlockKeys) -> tuple[torch.Tensor, ...]:
        raw = torch.empty((keys.blocks, len(self._kv_heads), BLOCK_TOKENS, self._head_dim))
        place = 0
        for layer, group in groupby(self._kv_heads, key=lambda head: head[0]):
            heads = [head for _, head in group]
            tokens = keys.of_layer(layer)[:, :, heads].flatten(0, 1)
            unrotated = rotate(tokens, keys.to_raw(layer), out_dtype=torch.float32)
            by_block = unrotated.view(keys.blocks, BLOCK_TOKENS, len(heads), self._head_dim)
            raw[:, place : place + len(heads)] = by_block.transpose(1, 2)
            place += len(heads)
        return encode(self._precision, raw)

    def importance(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        means = [
            decode(self._precision, tuple(part[:, place] for part in parts)).mean(dim=1)
            for place in range(len(self._kv_heads))
        ]
        return norms(torch.cat(means, dim=1)) if means else torch.ones(len(parts[0]))

    def score(self, query: Query, tiles: Sequence[Tile]) -> torch.Tensor:
        blocks = sum(int(tile.candidates.sum()) for tile in tiles)
        asked = query.heads
        if query.content_rows is not None:
            asked = asked[:, query.content_rows]
        scores = torch.zeros(blocks, dtype=torch.float32, device=asked.device)
        if blocks == 0 or asked.numel() == 0:
            return spread(tiles, scores)
        used = [tile for tile in tiles if bool(tile.candidates.any())]
        for place, ((layer, _), heads) in enumerate(self._query_heads.items()):
            of_tiles = [
                tuple(tile.chosen(part[place], 0) for part in tile.parts) for tile in used
            ]
            queries = asked[layer][:, heads]  # [tokens, heads, head_dim]
            best = scores.new_full((blocks, len(heads)), -torch.inf)
            step = max(1, _LOGITS_BYTES // (4 * len(heads) * blocks))
            for start in range(0, len(queries), step):
                rows = queries[start : start + step].flatten(0, 1)
                logits = self._block_logits(rows, of_tiles, blocks)
                deviations = _standardised(logits).view(blocks, -1, len(heads))
                best = torch.maximum(best, deviations.amax(dim=1))
            scores += best.sum(dim=1)
        return spread(tiles, scores)

    def _block_logits(
        self,
        queries: torch.Tensor,
        of_tiles: Sequence[tuple[torch.Tensor, ...]],
        blocks: int,
    ) -> torch.Tensor:
        """Each block's best token for each query row.

        Args:
            queries: [rows, head_dim].
            of_tiles: a KV head's parts of each tile's candidates, each [blocks, *after].

        Returns:
            [blocks, rows] float32.
        """
        rows = len(queries)
        logits = queries.new_empty((blocks, rows))
        columns = queries.t().contiguous()
        step = max(1, _TOKEN_LOGITS_BYTES // (4 * BLOCK_TOKENS * rows))
        begin = 0
        for parts in of_tiles:
            for start in range(0, len(parts[0]), step):
                keys = decode(self._precision, tuple(p[start : start + step] for p in parts))
                of_tokens = torch.mm(keys.flatten(0, 1), columns).view(*keys.shape[:2], rows)
                torch.amax(of_tokens, dim=1, out=logits[begin : begin + len(keys)])
                begin += len(keys)
        return logits


def _standardised(logits: torch.Tensor) -> torch.Tensor:
    """Deviations from the mean of all blocks, in standard deviations; 0 where all are equal.

    Mutates: `logits`, [blocks, rows].
    """
    deviation, mean = torch.std_mean(logits, dim=0, correction=0, keepdim=True)
    differs = deviation > 1e-6 * logits.abs().amax(dim=0, keepdim=True)
    return logits.sub_(mean).mul_(torch.where(differs, 1 / deviation, 0.0))
