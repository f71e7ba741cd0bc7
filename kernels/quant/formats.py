"""What the quantised formats are: groups, grids and where the bits lie.

A group of values shares one grid. Which values form a group:

    format        keys                                values
    int8          a channel of a block, all tokens    a token's head, all dimensions
    int4          a channel of a block, all tokens    a token's head, up to 32 dimensions
    fp8           a head of a block                   a head of a block

Channels of raw keys differ in size and offset far more than their tokens do; values show no such
order. int8 and int4 code x as the point of the grid low + step · {0 … 255 or 15} nearest to it;
fp8 as scale · (the nearest e4m3 number). Grids are asymmetric, because key channels have offsets:
symmetric ones cost SmolLM2 several times the KL divergence.

Steps and scales are bfloat16, rounded up, so that no range over- or underflows; lows are float16,
rounded down, for the precision that a channel with a large offset needs. The grid so covers its
group always, and values equal to its points come back exactly.
"""

from __future__ import annotations

import math
from typing import Literal

Format = Literal["fp8", "int8", "int4"]
Side = Literal["keys", "values"]

LEVELS: dict[Format, int] = {"int8": 255, "int4": 15}
"""Steps from the lowest code to the highest."""

LARGEST = 60000.0
"""Larger magnitudes, infinities included, saturate: decoded values then fit into float16."""

SMALLEST_STEP = 2.0**-126
"""Steps stay normal numbers, so that their reciprocals are finite, for constant groups too."""

FP8_LARGEST = 448.0

_RUN_DIMS_MAX = 32


def run_dims(format: Format, side: Side, head_dim: int) -> int:
    """Consecutive dimensions of a head that share a grid where groups don't span tokens."""
    if format == "int4" and side == "values":
        return math.gcd(head_dim, _RUN_DIMS_MAX)
    return head_dim


def codes_shape(
    format: Format, tokens: int, heads: int, head_dim: int
) -> tuple[int, int, int]:
    """Shape of a block's uint8 codes.

    int4 packs tokens t and t + tokens / 2 into byte [t, head, dim]: the former is its low half.
    """
    return (tokens // 2 if format == "int4" else tokens, heads, head_dim)


def scales_shape(
    format: Format, side: Side, tokens: int, heads: int, head_dim: int
) -> tuple[int, ...]:
    """Shape of a block's scales, int16 bit patterns: steps (bfloat16) then lows (float16).

    fp8 has scales (bfloat16) only.
    """
    if format == "fp8":
        return (1, heads)
    if side == "keys":
        return (2, heads, head_dim)
    return (2, tokens, heads, head_dim // run_dims(format, side, head_dim))
