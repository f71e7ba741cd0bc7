"""How the keys of content heads lie in an index row."""

from __future__ import annotations

import torch

from kvws.blocks.key import BLOCK_TOKENS
from kvws.recall.profile import ContentKeys
from kvws.recall.signals.signal import Part, to_half

_LARGEST = {"int4": 7, "int8": 127}


def content_parts(precision: ContentKeys, heads: int, head_dim: int) -> tuple[Part, ...]:
    """Parts of a row: scales and codes of every token, or means.

    Codes of int4 are two to a byte: of dimension j in the low half and of j + head_dim/2 in the
    high one, 8 larger than their value.
    """
    if precision == "means":
        return (Part(torch.float16, (heads,), (1, head_dim)),)
    scales = Part(torch.float16, (heads,), (BLOCK_TOKENS,))
    if precision == "int8":
        return scales, Part(torch.int8, (heads,), (BLOCK_TOKENS, head_dim))
    return scales, Part(torch.uint8, (heads,), (BLOCK_TOKENS, head_dim // 2))


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
    low, high = (codes + 8).to(torch.uint8).chunk(2, dim=3)
    return scales, low | (high << 4)


def decode(precision: ContentKeys, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Parts of one head to keys.

    Args:
        parts: each [blocks, *after].

    Returns:
        [blocks, BLOCK_TOKENS, head_dim] float32, or of means [blocks, 1, head_dim].
    """
    if precision == "means":
        return parts[0].float()
    scales, codes = parts
    if precision == "int8":
        keys = codes.float()
    else:
        blocks, tokens, half = codes.shape
        keys = scales.new_empty((blocks, tokens, 2 * half), dtype=torch.float32)
        keys[..., :half] = codes & 15
        keys[..., half:] = codes >> 4
        keys -= 8
    return keys.mul_(scales.float().unsqueeze(2))
