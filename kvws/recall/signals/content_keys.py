"""How the keys of content heads lie in an index row."""

from __future__ import annotations

import torch

from kvws.blocks.key import BLOCK_TOKENS
from kvws.kernels.token_scores.formats import INT4_ZERO, PART_DTYPES, part_shapes
from kvws.recall.profile import ContentKeys
from kvws.recall.signals.signal import Part, to_half

_LARGEST = {"int4": 7, "int8": 127}


def content_parts(precision: ContentKeys, heads: int, head_dim: int) -> tuple[Part, ...]:
    """Parts of a row: scales and codes of every token, or means."""
    shapes = part_shapes(precision, BLOCK_TOKENS, head_dim)
    return tuple(
        Part(dtype, (heads,), shape)
        for dtype, shape in zip(PART_DTYPES[precision], shapes, strict=True)
    )


def encode(precision: ContentKeys, keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Keys as parts.

    Symmetric, one scale per head and token: a code is the nearest of -7 … 7 or -127 … 127.

    Args:
        keys: [blocks, heads, BLOCK_TOKENS, head_dim] float32, not rotated.

    Returns:
        each [blocks, *before, *after].
    """
    if precision == "means":
        return (to_half(keys.mean(dim=2, keepdim=True)),)
    largest = _LARGEST[precision]
    scales = to_half(keys.abs().amax(dim=3) / largest)
    step = scales.float().unsqueeze(3)
    codes = torch.where(step > 0, keys / step, 0.0).round_().clamp_(-largest, largest)
    if precision == "int8":
        return scales, codes.to(torch.int8)
    low, high = (codes + INT4_ZERO).to(torch.uint8).chunk(2, dim=3)
    return scales, low | (high << 4)
