"""How the token keys of one KV head lie in an index.

    format   tensors of a block
    int8     scales [tokens] float16, codes [tokens, head_dim] int8
    int4     scales [tokens] float16, codes [tokens, head_dim / 2] uint8
    means    mean [1, head_dim] float16: one key that stands for the block's

A key is its scale times its codes. Codes of int4 are two to a byte, of dimension j in the low half
and of j + head_dim / 2 in the high one, 8 larger than their value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

TokenFormat = Literal["int4", "int8", "means"]

INT4_ZERO = 8
"""What a code of int4 is larger than its value."""

PART_DTYPES: dict[TokenFormat, tuple[torch.dtype, ...]] = {
    "int4": (torch.float16, torch.uint8),
    "int8": (torch.float16, torch.int8),
    "means": (torch.float16,),
}


def format_of(parts: Sequence[torch.Tensor]) -> TokenFormat | None:
    """The format of such tensors; None where there is none."""
    dtypes = tuple(part.dtype for part in parts)
    return next((name for name, known in PART_DTYPES.items() if known == dtypes), None)


def part_shapes(format: TokenFormat, tokens: int, head_dim: int) -> list[tuple[int, ...]]:
    """The shape of each tensor of a block. `tokens`: of a block, 1 for means."""
    if format == "means":
        return [(1, head_dim)]
    return [(tokens,), (tokens, head_dim if format == "int8" else head_dim // 2)]


def decode(format: TokenFormat, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Keys of one head.

    Args:
        parts: each [blocks, …] as above.

    Returns:
        [blocks, tokens, head_dim] float32.
    """
    if format == "means":
        return parts[0].float()
    scales, codes = parts
    if format == "int8":
        keys = codes.float()
    else:
        blocks, tokens, half = codes.shape
        keys = scales.new_empty((blocks, tokens, 2 * half), dtype=torch.float32)
        keys[..., :half] = codes & 15
        keys[..., half:] = codes >> 4
        keys -= INT4_ZERO
    return keys.mul_(scales.float().unsqueeze(2))
