"""Largest logits in integer products, on CPUs that add four of them in one instruction (VNNI).

Codes are integers as they are. A query row becomes one of 16 bits, in two halves of 8 bits: two
products of bytes take less than half the time of one in fp32, and keys need no decoding. Logits
are wrong by 2⁻¹⁵ of a query's largest entry times the sum of a key's entries at most: hundreds of
times less than by what was lost in the codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from kvws.kernels.token_scores.formats import INT4_ZERO, TokenFormat
from kvws.kernels.token_scores.gathered import Gathered

PRODUCTS_BYTES = 2 << 20
"""Products held at a time: small enough to stay in cache until they are reduced."""

HEAD_DIM_MAX = 512
"""Sums of more products of a code and 16 bits could pass 32 bits."""

_HALF = 256
_LARGEST = 127 * _HALF - 1
"""Of a query's entries: the upper half then lies in -127 … 127, the lower in -128 … 127."""


@cache
def cpu_multiplies_bytes() -> bool:
    """Whether this CPU and this torch do it; without VNNI sums of two products may saturate."""
    known = hasattr(torch, "_int_mm") and hasattr(torch.cpu, "_is_vnni_supported")
    return known and torch.cpu._is_vnni_supported()  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


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
            format: int8 or int4.
            tiles: the tensors of each, [kv_heads, tile_blocks, …].
            candidates: each [tile_blocks] bool.
        """
        assert format != "means", "means are no integers"
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
        halves, steps = _in_halves(rows)
        begin, count = 0, len(rows)
        for scales, codes in self._gathered.of_head(kv_head):
            keys = codes.shape[1]
            size = max(1, PRODUCTS_BYTES // (8 * keys * count))
            for some, factors in zip(
                torch.split(codes, size), torch.split(scales.float(), size), strict=True
            ):
                bytes_of_keys = _bytes(self._format, some).flatten(0, 1)
                products = _multiplied(bytes_of_keys, halves)
                whole = torch.add(products[:, count:], products[:, :count], alpha=_HALF)
                logits = whole.float().view(len(some), keys, count).mul_(factors.unsqueeze(2))
                torch.amax(logits, dim=1, out=out[begin : begin + len(some)])
                begin += len(some)
        out.mul_(steps)


def _multiplied(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product of two int8 matrices, int32."""
    return torch._int_mm(a, b)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def _in_halves(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Query rows as integers of 16 bits.

    Returns:
        [head_dim, 2·rows] int8: the upper halves of all rows, then the lower ones; [rows] float32:
        what one is worth.
    """
    smallest = torch.finfo(torch.float32).tiny
    steps = rows.abs().amax(dim=1).clamp(min=smallest * _LARGEST) / _LARGEST
    whole = (rows / steps.unsqueeze(1)).round_()
    upper = ((whole + _HALF // 2) / _HALF).floor_()
    lower = whole - _HALF * upper
    return torch.cat([upper, lower]).to(torch.int8).t(), steps


def _bytes(format: TokenFormat, codes: torch.Tensor) -> torch.Tensor:
    """Codes as int8, one a dimension: [blocks, keys, head_dim]."""
    if format == "int8":
        return codes
    return torch.cat([codes & 15, codes >> 4], dim=2).view(torch.int8).sub_(INT4_ZERO)
