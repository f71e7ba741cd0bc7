"""`content`: token keys of the few heads that a calibration found to look for content."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from itertools import groupby

import torch

from kvws.blocks.key import BLOCK_TOKENS
from kvws.kernels.rerope import rotate
from kvws.kernels.token_scores import decode, token_scores
from kvws.recall.profile import ContentKeys
from kvws.recall.signals.content_keys import content_parts, encode
from kvws.recall.signals.signal import BlockKeys, Part, Query, Tile, device_of, norms


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
        return norms(self.mean_keys(parts)) if self._kv_heads else torch.ones(len(parts[0]))

    def mean_keys(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Of blocks, [blocks, KV heads, head_dim] float32.

        Args:
            parts: as `rows` makes them.
        """
        means = parts[0].new_empty(
            (len(parts[0]), len(self._kv_heads), self._head_dim), dtype=torch.float32
        )
        for place in range(len(self._kv_heads)):
            of_head = decode(self._precision, tuple(part[:, place] for part in parts))
            torch.mean(of_head, dim=1, out=means[:, place])
        return means

    def of_means(self) -> Content:
        """The same heads, with one mean key for each row instead of every token's."""
        other = copy(self)
        other._precision = "means"
        other.parts = content_parts("means", len(self._kv_heads), self._head_dim)
        return other

    def score(self, query: Query, tiles: Sequence[Tile]) -> torch.Tensor:
        device = device_of(tiles, query.heads)
        asked = query.heads
        if query.content_rows is not None:
            asked = asked[:, query.content_rows]
        return token_scores(
            [
                asked[layer][:, heads].to(device)
                for (layer, _), heads in self._query_heads.items()
            ],
            [tile.parts for tile in tiles],
            [tile.candidates for tile in tiles],
        )
