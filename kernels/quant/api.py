"""Quantise the K or V of blocks of one layer, and bring it back."""

from __future__ import annotations

from typing import get_args

import torch

from kvws.errors import ConfigError
from kvws.kernels.dispatch import (
    PAYLOAD_DTYPES,
    Implementation,
    check_dtype,
    check_same_device,
    resolve,
)
from kvws.kernels.quant import reference
from kvws.kernels.quant.formats import Format, Side, codes_shape, scales_shape


def quantise(
    x: torch.Tensor,
    format: Format,
    side: Side,
    *,
    implementation: Implementation = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of blocks, each value rounded to the nearest point of its group's grid.

    Beside fp32 rounding, |x - x̂| is at most half a step (int8, int4; a step is at most 1/128
    larger than its group's range asks for), or the larger of |x| / 16 and scale / 1024 (fp8).
    Magnitudes over 60000 saturate, infinities included. A NaN makes its whole group NaN and no
    other.

    Args:
        x: [blocks, tokens, heads, head_dim] float32, float16 or bfloat16; need not be
            contiguous. Keys should be raw: a rotation smears their channels.
        format: "fp8", "int8" or "int4" (an even number of tokens).
        side: "keys" or "values": how values are grouped, see `formats`.

    Returns:
        codes: [blocks, *codes_shape(…)] uint8, contiguous.
        scales: [blocks, *scales_shape(…)] int16 bit patterns, contiguous.

    Raises:
        ConfigError: the implementation, the format or a dtype is not supported.
        ValueError: the shape is not one of blocks.
    """
    chosen = resolve(implementation, x)
    check_dtype("x", x, PAYLOAD_DTYPES)
    _check_blocks("x", x, format, side)
    if chosen == "reference":
        return reference.quantise(x, format, side)
    from kvws.kernels.quant import triton

    return triton.quantise(x, format, side)


def dequantise(
    codes: torch.Tensor,
    scales: torch.Tensor,
    format: Format,
    side: Side,
    out: torch.Tensor,
    *,
    implementation: Implementation = "auto",
) -> None:
    """The values that codes and scales stand for, computed in fp32 and rounded once.

    Mutates: all of `out`.

    Args:
        codes: [blocks, *codes_shape(…)] uint8; blocks may lie apart, each is contiguous.
        scales: [blocks, *scales_shape(…)] int16; likewise.
        format: as given to `quantise`.
        side: as given to `quantise`.
        out: [blocks, tokens, heads, head_dim] float32, float16 or bfloat16; need not be
            contiguous.

    Raises:
        ConfigError: the implementation, the format or a dtype is not supported.
        ValueError: a shape, a dtype or a device contradicts `out`.
    """
    chosen = resolve(implementation, out)
    check_dtype("out", out, PAYLOAD_DTYPES)
    _check_blocks("out", out, format, side)
    blocks, tokens, heads, head_dim = out.shape
    _check_part("codes", codes, (blocks, *codes_shape(format, tokens, heads, head_dim)), "uint8")
    expected = (blocks, *scales_shape(format, side, tokens, heads, head_dim))
    _check_part("scales", scales, expected, "int16")
    check_same_device(out=out, codes=codes, scales=scales)
    if chosen == "reference":
        reference.dequantise(codes, scales, format, side, out)
    else:
        from kvws.kernels.quant import triton

        triton.dequantise(codes, scales, format, side, out)


def _check_blocks(name: str, x: torch.Tensor, format: Format, side: Side) -> None:
    for kind, value, known in (("format", format, Format), ("side", side, Side)):
        if value not in get_args(known):
            raise ConfigError(
                f"unknown {kind}: expected one of {', '.join(get_args(known))}, got {value!r}"
            )
    if x.dim() != 4 or 0 in x.shape[1:]:
        raise ValueError(
            f"{name} must be [blocks, tokens, heads, head_dim] without empty blocks, "
            f"got {tuple(x.shape)}"
        )
    if format == "int4" and x.shape[1] % 2:
        raise ValueError(f"int4 packs tokens in pairs: expected an even number, got {x.shape[1]}")


def _check_part(name: str, part: torch.Tensor, shape: tuple[int, ...], dtype: str) -> None:
    if part.shape != shape or part.dtype != getattr(torch, dtype):
        raise ValueError(
            f"{name} must be {shape} torch.{dtype}, got {tuple(part.shape)} {part.dtype}"
        )
    if shape[0] and not part[0].is_contiguous():
        raise ValueError(f"{name} must be contiguous within a block, got strides {part.stride()}")
