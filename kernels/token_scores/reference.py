"""Largest logits in torch: the specification of the operation, and its CPU implementation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvws.kernels.candidates import pieces, stretches, together
from kvws.kernels.token_scores.formats import TokenFormat, decode

TOKEN_LOGITS_BYTES = 2 << 20
"""Logits of tokens held at a time: small enough to stay in cache until they are reduced."""

COPIES_BYTES = 64 << 20
"""Keys of scattered candidates, of all KV heads, copied once rather than at every reading."""


class LargestLogits:
    """Of some candidates, for one KV head after another.

    Attributes:
        count: of the candidates.
    """

    def __init__(
        self,
        format: TokenFormat,
        tiles: Sequence[tuple[torch.Tensor, ...]],
        candidates: Sequence[torch.Tensor],
    ) -> None:
        """
        Args:
            tiles: the tensors of each, [kv_heads, tile_blocks, …].
            candidates: each [tile_blocks] bool.
        """
        self._format: TokenFormat = format
        self._tiles, self._pieces = together(tiles, pieces(candidates), 1, COPIES_BYTES)
        self.count = sum(piece.count for piece in self._pieces)

    @torch.no_grad()
    def write(self, rows: torch.Tensor, kv_head: int, out: torch.Tensor) -> None:
        """Each candidate's largest logit of any of its keys, for each row.

        Mutates: all of `out`, [candidates, rows].

        Args:
            rows: [rows, head_dim].
        """
        tiles = [tuple(part[kv_head] for part in parts) for parts in self._tiles]
        columns = rows.t().contiguous()
        begin = 0
        for parts in stretches(tiles, self._pieces, 0):
            keys_of_block = parts[0].shape[1]
            step = max(1, TOKEN_LOGITS_BYTES // (4 * keys_of_block * len(rows)))
            for start in range(0, len(parts[0]), step):
                keys = decode(self._format, [part[start : start + step] for part in parts])
                logits = torch.mm(keys.flatten(0, 1), columns).view(*keys.shape[:2], len(rows))
                torch.amax(logits, dim=1, out=out[begin : begin + len(keys)])
                begin += len(keys)
