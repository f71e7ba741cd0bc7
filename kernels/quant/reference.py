"""Quantisation in torch: the specification of the operation, and its CPU implementation.

Nothing is chunked: callers hand over as many blocks as their cache holds.
"""

from __future__ import annotations

import torch

from kvws.kernels.quant.formats import (
    FP8_LARGEST,
    LARGEST,
    LEVELS,
    SMALLEST_STEP,
    Format,
    Side,
    run_dims,
    scales_shape,
)


@torch.no_grad()
def quantise(x: torch.Tensor, format: Format, side: Side) -> tuple[torch.Tensor, torch.Tensor]:
    """[blocks, tokens, heads, head_dim], any payload dtype → codes uint8, scales int16."""
    x = x.float().clamp(-LARGEST, LARGEST)
    if format == "fp8":
        return _quantise_fp8(x)
    # [blocks, tokens, heads, runs, run]; a group is one run of a token, or a channel.
    run = run_dims(format, side, x.shape[3])
    runs = x.view(*x.shape[:3], x.shape[3] // run, run)
    group = 1 if side == "keys" else 4
    low = round_down_to_fp16(runs.amin(group, keepdim=True))
    highest = runs.amax(group, keepdim=True)
    step = round_up_to_bf16((highest - low.float()).div_(LEVELS[format]).clamp_(SMALLEST_STEP))
    grid = runs.sub_(low.float()).mul_(step.float().reciprocal()).round_()
    # By way of int32, because torch converts fp32 to uint8 one by one.
    codes = grid.flatten(3).to(torch.int32).to(torch.uint8)
    if format == "int4":
        half = codes.shape[1] // 2
        codes = codes[:, :half] | codes[:, half:] << 4
    scales = torch.stack((step.view(torch.int16), low.view(torch.int16)), dim=1)
    return codes.contiguous(), scales.reshape(-1, *scales_shape(format, side, *x.shape[1:]))


def _quantise_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    largest = x.abs().amax((1, 3))
    scale = round_up_to_bf16(largest.div_(FP8_LARGEST).clamp_(SMALLEST_STEP))
    x.mul_(scale.float().reciprocal()[:, None, :, None])
    codes = x.to(torch.float8_e4m3fn).view(torch.uint8).contiguous()
    return codes, scale.view(torch.int16).unsqueeze(1)


@torch.no_grad()
def dequantise(
    codes: torch.Tensor, scales: torch.Tensor, format: Format, side: Side, out: torch.Tensor
) -> None:
    """Mutates: all of `out`, [blocks, tokens, heads, head_dim], any payload dtype."""
    if format == "fp8":
        scale = scales[:, 0].view(torch.bfloat16).float()
        numbers = codes.view(torch.float8_e4m3fn).float()
        out.copy_(numbers.mul_(scale[:, None, :, None]))
        return
    group = 1 if side == "keys" else -1
    step = scales[:, 0].view(torch.bfloat16).float().unsqueeze(group)
    low = scales[:, 1].view(torch.float16).float().unsqueeze(group)
    if format == "int4":
        codes = torch.cat((codes & 15, codes >> 4), dim=1)
    grid = codes.float()
    if side == "keys":
        grid.mul_(step).add_(low)
    else:
        run = run_dims(format, side, out.shape[3])
        grid.view(*step.shape[:4], run).mul_(step).add_(low)
    out.copy_(grid)


def round_up_to_bf16(x: torch.Tensor) -> torch.Tensor:
    """The smallest bfloat16 that is not less. x: fp32, positive or NaN."""
    nearest = x.to(torch.bfloat16)
    return (nearest.view(torch.int16) + (nearest.float() < x)).view(torch.bfloat16)


def round_down_to_fp16(x: torch.Tensor) -> torch.Tensor:
    """The largest float16 that is not more. x: fp32, inside float16's range or NaN."""
    nearest = x.to(torch.float16)
    bits = nearest.view(torch.int16)
    # A negative x that rounds to zero gives -0, whose next bit pattern is the one below it.
    below = torch.where(nearest > 0, bits - 1, bits + 1)
    return torch.where(nearest.float() > x, below, bits).view(torch.float16)
