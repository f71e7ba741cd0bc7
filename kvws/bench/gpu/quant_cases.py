"""Cases of quantisation at rest, both ways."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import get_args

import torch

from kvws.bench.gpu.case import (
    BLOCK_TOKENS,
    CHECKED,
    Case,
    Prepared,
    Sizes,
    Tensors,
    Tolerance,
    close,
    random_normal,
)
from kvws.kernels.dispatch import Implementation
from kvws.kernels.quant import Format, Side, dequantise, quantise
from kvws.kernels.quant.formats import run_dims

_TIMED = replace(CHECKED, blocks=2048)
_ALIKE = 0.98
"""Codes that must be the reference's: a GPU divides by multiplying, so values halfway between two
points of a grid may go to either."""

_LARGEST_FP8_STEP = 32


def quant_cases() -> Iterator[Case]:
    for format in get_args(Format):
        for side in get_args(Side):
            if format == "fp8" and side == "values":
                continue  # coded as keys are
            name = format if format == "fp8" else f"{format} {side}"
            for dtype, timed in ((torch.bfloat16, _TIMED), (torch.float32, None)):
                variant = f"{name}, {str(dtype).removeprefix('torch.')}"
                there = partial(_quantise, format, side, dtype)
                back = partial(_dequantise, format, side, dtype)
                yield Case("quant", f"to {variant}", there, timed)
                yield Case("quant", f"from {variant}", back, timed)


def _blocks(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Channels of different offsets and sizes, one of them constant."""
    shape = (sizes.blocks, BLOCK_TOKENS, sizes.kv_heads, sizes.head_dim)
    x = random_normal(shape, device, dtype)
    x += random_normal(shape[3:], device, dtype, seed=1) * 10
    x[..., 3] *= 1e-3
    x[..., 5] = 3.75
    return x


def _quantise(
    format: Format, side: Side, dtype: torch.dtype, sizes: Sizes, device: torch.device
) -> Prepared:
    x = _blocks(sizes, device, dtype)

    def run(implementation: Implementation) -> Tensors:
        return quantise(x, format, side, implementation=implementation)

    codes, scales = run("reference")
    return Prepared(
        kernel=lambda: run("triton"),
        reference=lambda: run("reference"),
        tolerance=codes_alike(format, side, sizes.head_dim),
        moved_bytes=x.nbytes + codes.nbytes + scales.nbytes,
    )


def codes_alike(format: Format, side: Side, head_dim: int) -> Tolerance:
    """Nearly all codes equal, and no value decoded to anything but a neighbouring point."""

    def share(got: Tensors, expected: Tensors) -> float:
        if [part.shape for part in got] != [part.shape for part in expected]:
            return math.inf
        differing = float((got[0] != expected[0]).float().mean()) / (1 - _ALIKE)
        values, wanted = (
            _decoded(format, side, head_dim, *parts) for parts in (got, expected)
        )
        steps = 1.05 * _steps(format, side, head_dim, expected[1])
        off = ((values - wanted).abs() / steps).nan_to_num(math.inf).max()
        return max(differing, float(off))

    return Tolerance(f"{_ALIKE:.0%} of the codes equal, others one step off", share)


def _decoded(
    format: Format, side: Side, head_dim: int, codes: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    shape = (codes.shape[0], BLOCK_TOKENS, codes.shape[2], head_dim)
    out = torch.empty(shape, dtype=torch.float32, device=codes.device)
    dequantise(codes, scales, format, side, out, implementation="reference")
    return out


def _steps(format: Format, side: Side, head_dim: int, scales: torch.Tensor) -> torch.Tensor:
    """Between neighbouring points, at most: broadcasts to [blocks, tokens, heads, head_dim]."""
    first = scales[:, 0].view(torch.bfloat16).float()
    if format == "fp8":
        return _LARGEST_FP8_STEP * first[:, None, :, None]
    if side == "keys":
        return first.unsqueeze(1)
    return first.repeat_interleave(run_dims(format, side, head_dim), dim=3)


def _dequantise(
    format: Format, side: Side, dtype: torch.dtype, sizes: Sizes, device: torch.device
) -> Prepared:
    x = _blocks(sizes, device, dtype)
    codes, scales = quantise(x, format, side, implementation="reference")
    outs = (torch.full_like(x, math.nan), torch.full_like(x, math.nan))

    def run(out: torch.Tensor, implementation: Implementation) -> Tensors:
        dequantise(codes, scales, format, side, out, implementation=implementation)
        return (out,)

    return Prepared(
        kernel=lambda: run(outs[0], "triton"),
        reference=lambda: run(outs[1], "reference"),
        tolerance=close(0.0 if dtype == torch.float32 else torch.finfo(dtype).eps, 2e-7),
        moved_bytes=x.nbytes + codes.nbytes + scales.nbytes,
    )
