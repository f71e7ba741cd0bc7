"""Largest logits in integer products, on CPUs that add four of them in one instruction (VNNI).

Codes are integers as they are. A query row becomes one of 16 bits, in two halves of 8 bits: two
products of bytes take about half the time of one in fp32, and keys need no decoding. Logits are
wrong by 2⁻¹⁵ of a query's largest entry times the sum of a key's entries at most: hundreds of
times less than by what was lost in the codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from kvws.kernels.token_scores.formats import INT4_ZERO, TokenFormat
from kvws.kernels.token_scores.gathered import Gathered

PRODUCTS_BYTES = 1 << 20
"""Products held at a time: passing over them costs more than making them, unless a core's own
cache holds them until they are reduced."""

ROWS_AT_ONCE = 128
"""Query rows of a product: the more of them, the fewer keys have room beside them."""

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
        columns = min(len(rows), ROWS_AT_ONCE)
        queries = list(zip(*(torch.split(half, columns, dim=1) for half in halves), strict=True))
        room: list[torch.Tensor] = []
        begin = 0
        for scales, codes in self._gathered.of_head(kv_head):
            keys = codes.shape[1]
            size = max(1, PRODUCTS_BYTES // (8 * keys * columns))
            if not room:
                room = [torch.empty(size * keys * columns, dtype=torch.int32) for _ in range(2)]
            for some, factors in zip(
                torch.split(codes, size), torch.split(scales.float(), size), strict=True
            ):
                bytes_of_keys = _bytes(self._format, some).flatten(0, 1)
                targets = torch.split(out[begin : begin + len(some)], columns, dim=1)
                for query, target in zip(queries, targets, strict=True):
                    logits = _logits(bytes_of_keys, factors.view(-1, 1), query, room)
                    torch.amax(logits.view(len(some), keys, -1), dim=1, out=target)
                begin += len(some)
        out.mul_(steps)


def _logits(
    keys: torch.Tensor,
    factors: torch.Tensor,
    query: tuple[torch.Tensor, torch.Tensor],
    room: Sequence[torch.Tensor],
) -> torch.Tensor:
    """q·k in steps of the queries: [keys, rows] float32, in the room.

    Args:
        keys: [keys, head_dim] int8, of which one is worth `factors`, [keys, 1] float32.
        query: upper and lower halves of some rows, each [head_dim, rows] int8.
        room: two of at least [keys·rows] int32, overwritten.
    """
    rows = query[0].shape[1]
    upper, lower = (part[: len(keys) * rows].view(len(keys), rows) for part in room)
    _multiply(keys, query[0], upper)
    _multiply(keys, query[1], lower)
    return upper.view(torch.float32).copy_(lower.add_(upper, alpha=_HALF)).mul_(factors)


def _multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """The product of two int8 matrices, int32."""
    torch._int_mm(a, b, out=out)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def _in_halves(
    rows: torch.Tensor,
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Query rows as integers of 16 bits.

    Returns:
        (their upper and their lower halves, each [head_dim, rows] int8; [rows] float32: what one
        is worth).
    """
    smallest = torch.finfo(torch.float32).tiny
    steps = rows.abs().amax(dim=1).clamp(min=smallest * _LARGEST) / _LARGEST
    whole = (rows / steps.unsqueeze(1)).round_()
    upper = ((whole + _HALF // 2) / _HALF).floor_()
    lower = whole - _HALF * upper
    return (upper.to(torch.int8).t(), lower.to(torch.int8).t()), steps


def _bytes(format: TokenFormat, codes: torch.Tensor) -> torch.Tensor:
    """Codes as int8, one a dimension: [blocks, keys, head_dim]."""
    if format == "int8":
        return codes
    return torch.cat([codes & 15, codes >> 4], dim=2).view(torch.int8).sub_(INT4_ZERO)
