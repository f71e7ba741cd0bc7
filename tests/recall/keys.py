"""Keys and queries of a small model, and plain ways to rotate and compare them."""

from __future__ import annotations

import torch

from kvws.blocks.key import BLOCK_TOKENS
from kvws.kernels.rotary import RotaryTable
from kvws.recall.profile import ContentKeys, Profile

LAYERS, KV_HEADS, QUERY_HEADS, DIM = 4, 2, 4, 8
GROUP = QUERY_HEADS // KV_HEADS
RAW = -1
MAX_POSITION = 4096


def table(rotary_dim: int, *, interleaved: bool = False, factor: float = 1.0) -> RotaryTable:
    frequency = 100.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angle = torch.arange(MAX_POSITION, dtype=torch.float64).unsqueeze(1) * frequency
    return RotaryTable(
        (factor * angle.cos()).float(), (factor * angle.sin()).float(), interleaved
    )


TABLES = {
    "neox": table(8),
    "interleaved": table(8, interleaved=True),
    "partial": table(4),
    "partial interleaved": table(4, interleaved=True),
    "attention factor": table(8, factor=1.37),
}


def seeded(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def profile(
    heads: tuple[tuple[int, int], ...] = ((1, 0), (1, 3), (2, 2)),
    *,
    content_keys: ContentKeys = "int8",
    rotated_layers: tuple[int, ...] = (0, 2),
) -> Profile:
    return Profile(
        "small", LAYERS, QUERY_HEADS, KV_HEADS, DIM, heads, rotated_layers, content_keys
    )


def complex_pairs(x: torch.Tensor, rotary: RotaryTable) -> torch.Tensor:
    """The rotated pairs of [..., dim] as complex numbers in fp64."""
    turned = x[..., : rotary.rotary_dim].double()
    if rotary.interleaved:
        return torch.complex(turned[..., ::2], turned[..., 1::2])
    half = rotary.rotary_dim // 2
    return torch.complex(turned[..., :half], turned[..., half:])


def of_pairs(pairs: torch.Tensor, x: torch.Tensor, rotary: RotaryTable) -> torch.Tensor:
    """Put pairs back in front of what passes through of x [..., dim]; fp64."""
    out = x.double().clone()
    if rotary.interleaved:
        out[..., 0 : rotary.rotary_dim : 2] = pairs.real
        out[..., 1 : rotary.rotary_dim : 2] = pairs.imag
    else:
        half = rotary.rotary_dim // 2
        out[..., :half], out[..., half : rotary.rotary_dim] = pairs.real, pairs.imag
    return out


def turned(x: torch.Tensor, rotary: RotaryTable, positions: torch.Tensor) -> torch.Tensor:
    """What the engine makes of raw x [tokens, heads, dim] at positions; fp64."""
    z = torch.complex(rotary.cos.double(), rotary.sin.double())[positions].unsqueeze(1)
    return of_pairs(complex_pairs(x, rotary) * z, x, rotary)


def baked(raw: torch.Tensor, rotary: RotaryTable, first_positions: list[int]) -> torch.Tensor:
    """Raw blocks [layers, blocks·32, heads, dim] as an engine leaves them: block b begins at
    first_positions[b], or stays raw."""
    blocks = raw.clone().unflatten(1, (-1, BLOCK_TOKENS))
    for block, first in enumerate(first_positions):
        if first != RAW:
            positions = first + torch.arange(BLOCK_TOKENS)
            for layer in blocks:
                layer[block] = turned(layer[block], rotary, positions).float()
    return blocks.flatten(1, 2)
