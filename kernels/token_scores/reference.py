"""Largest logits in torch: the specification of the operation, and its CPU implementation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvws.kernels.token_scores.formats import TokenFormat, decode
from kvws.kernels.token_scores.gathered import Gathered

TOKEN_LOGITS_BYTES = 2 << 20
"""Logits of tokens held at a time: small enough to stay in cache until they are reduced."""


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
        self._gathered = Gathered(tiles, candidates)
        self.count = self._gathered.count

    @torch.no_grad()
    def write(self, rows: torch.Tensor, kv_head: int, out: torch.Tensor) -> None:
        """Each candidate's largest logit of any of its keys, for each row.

        Mutates: all of `out`, [candidates, rows].

        Args:
            rows: [rows, head_dim].
        """
        columns = rows.t().contiguous()
        begin = 0
        for parts in self._gathered.of_head(kv_head):
            keys_of_block = parts[0].shape[1]
            step = max(1, TOKEN_LOGITS_BYTES // (4 * keys_of_block * len(rows)))
            for start in range(0, len(parts[0]), step):
                keys = decode(self._format, [part[start : start + step] for part in parts])
                target = out[begin : begin + len(keys)]
                if keys_of_block == 1:
                    torch.mm(keys.squeeze(1), columns, out=target)
                else:
                    logits = torch.mm(keys.flatten(0, 1), columns)
                    torch.amax(logits.view(*keys.shape[:2], len(rows)), dim=1, out=target)
                begin += len(keys)
