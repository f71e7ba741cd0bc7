"""Quantisation in Triton: a program per block, head and run of dimensions.

Whatever meets a stride is int64: operands may reach over more than 2³¹ elements along any axis.
"""

# Triton types a constexpr parameter as constexpr, and is called with plain numbers; its unrolled
# loops have no type at all.
# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kvws.kernels.quant.formats import (
    FP8_LARGEST,
    LARGEST,
    LEVELS,
    SMALLEST_STEP,
    Format,
    Side,
    codes_shape,
    run_dims,
    scales_shape,
)

_LARGEST = tl.constexpr(LARGEST)
_SMALLEST_STEP = tl.constexpr(SMALLEST_STEP)
_FP8_LARGEST = tl.constexpr(FP8_LARGEST)


@triton.jit
def quantise_kernel(
    x,
    codes,
    scales,
    heads,
    x_block_stride,
    x_token_stride,
    x_head_stride,
    x_dim_stride,
    TOKENS: tl.constexpr,
    RUN: tl.constexpr,
    RUNS: tl.constexpr,
    PARTS: tl.constexpr,
    LEVELS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_PART: tl.constexpr,
    BLOCK_RUN: tl.constexpr,
):
    """Program (b, h, r) codes run r of head h of block b; codes and scales are contiguous.

    A block's tokens lie in PARTS parts of a byte each; keys have one run, and all their parts
    share a grid.
    """
    block = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    run = tl.program_id(2).to(tl.int64)
    dim = tl.arange(0, BLOCK_RUN).to(tl.int64)
    is_dim = dim < RUN
    PART: tl.constexpr = TOKENS // PARTS
    source = x + block * x_block_stride + head * x_head_stride + run * RUN * x_dim_stride
    groups = heads * RUNS * (RUN if KEYS else TOKENS)
    steps = scales + block * 2 * groups
    lows = steps + groups
    if KEYS:
        token = tl.arange(0, BLOCK_TOKENS).to(tl.int64)
        mask = (token < TOKENS)[:, None] & is_dim[None, :]
        tile = _load(source, token, x_token_stride, dim, x_dim_stride, mask)
        low, step = _grid(tile, mask, LEVELS, 0)
        tl.store(steps + head * RUN + dim, _bits(step, tl.bfloat16), mask=is_dim)
        tl.store(lows + head * RUN + dim, _bits(low, tl.float16), mask=is_dim)
        low = low[None, :]
        step = step[None, :]
    row = tl.arange(0, BLOCK_PART).to(tl.int64)
    is_row = row < PART
    mask = is_row[:, None] & is_dim[None, :]
    packed = tl.zeros([BLOCK_PART, BLOCK_RUN], tl.int32)
    for part in tl.static_range(PARTS):
        token = part * PART + row
        tile = _load(source, token, x_token_stride, dim, x_dim_stride, mask)
        if not KEYS:
            low, step = _grid(tile, mask, LEVELS, 1)
            group = (token * heads + head) * RUNS + run
            tl.store(steps + group, _bits(step, tl.bfloat16), mask=is_row)
            tl.store(lows + group, _bits(low, tl.float16), mask=is_row)
            low = low[:, None]
            step = step[:, None]
        packed |= _nearest((tile - low) * (1.0 / step)) << (4 * part)
    width = RUNS * RUN
    target = codes + ((block * PART + row)[:, None] * heads + head) * width
    tl.store(target + (run * RUN + dim)[None, :], packed.to(tl.uint8), mask=mask)


@triton.jit
def dequantise_kernel(
    codes,
    scales,
    out,
    heads,
    codes_block_stride,
    scales_block_stride,
    out_block_stride,
    out_token_stride,
    out_head_stride,
    out_dim_stride,
    TOKENS: tl.constexpr,
    RUN: tl.constexpr,
    RUNS: tl.constexpr,
    PARTS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_PART: tl.constexpr,
    BLOCK_RUN: tl.constexpr,
):
    """Program (b, h, r) writes run r of head h of block b, as `quantise_kernel` coded it."""
    block = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    run = tl.program_id(2).to(tl.int64)
    dim = tl.arange(0, BLOCK_RUN).to(tl.int64)
    is_dim = dim < RUN
    PART: tl.constexpr = TOKENS // PARTS
    row = tl.arange(0, BLOCK_PART).to(tl.int64)
    is_row = row < PART
    mask = is_row[:, None] & is_dim[None, :]
    groups = heads * RUNS * (RUN if KEYS else TOKENS)
    steps = scales + block * scales_block_stride
    lows = steps + groups
    width = RUNS * RUN
    source = codes + block * codes_block_stride + (row[:, None] * heads + head) * width
    packed = tl.load(source + (run * RUN + dim)[None, :], mask=mask, other=0).to(tl.int32)
    target = out + block * out_block_stride + head * out_head_stride
    for part in tl.static_range(PARTS):
        token = part * PART + row
        if KEYS:
            step = _number(steps + head * RUN + dim, is_dim, tl.bfloat16)[None, :]
            low = _number(lows + head * RUN + dim, is_dim, tl.float16)[None, :]
        else:
            group = (token * heads + head) * RUNS + run
            step = _number(steps + group, is_row, tl.bfloat16)[:, None]
            low = _number(lows + group, is_row, tl.float16)[:, None]
        code = packed if PARTS == 1 else (packed >> (4 * part)) & 15
        value = code.to(tl.float32) * step + low
        place = token[:, None] * out_token_stride + (run * RUN + dim)[None, :] * out_dim_stride
        tl.store(target + place, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def quantise_fp8_kernel(
    x,
    codes,
    scales,
    heads,
    x_block_stride,
    x_token_stride,
    x_head_stride,
    x_dim_stride,
    TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Program (b, h) codes head h of block b; codes and scales are contiguous.

    e4m3 is made by hand: not every supported GPU converts to it.
    """
    block = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    token = tl.arange(0, BLOCK_TOKENS).to(tl.int64)
    dim = tl.arange(0, BLOCK_DIM).to(tl.int64)
    mask = (token < TOKENS)[:, None] & (dim < HEAD_DIM)[None, :]
    source = x + block * x_block_stride + head * x_head_stride
    tile = _load(source, token, x_token_stride, dim, x_dim_stride, mask)
    largest = tl.max(tl.max(tl.abs(tile), axis=1), axis=0)
    scale = tl.maximum(largest / _FP8_LARGEST, _SMALLEST_STEP)
    scale = _round_up_to_bf16(scale + tl.sum(tl.sum(_nan_or_zero(tile), axis=1), axis=0))
    tl.store(scales + block * heads + head, _bits(scale, tl.bfloat16))
    x8 = tile * (1.0 / scale)
    sign = (x8.to(tl.int32, bitcast=True) >> 24) & 0x80
    size = tl.abs(x8)
    bits = size.to(tl.int32, bitcast=True)
    # Exponents have 4 bits and a bias of 7 here, 8 and 127 there; fractions 3 and 23.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = _nearest(tl.minimum(size, 1.0) * 512.0)
    code = sign | tl.where(size < 0.015625, subnormal, normal)
    target = codes + ((block * TOKENS + token)[:, None] * heads + head) * HEAD_DIM
    tl.store(target + dim[None, :], code.to(tl.uint8), mask=mask)


@triton.jit
def dequantise_fp8_kernel(
    codes,
    scales,
    out,
    heads,
    codes_block_stride,
    scales_block_stride,
    out_block_stride,
    out_token_stride,
    out_head_stride,
    out_dim_stride,
    TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Program (b, h) writes head h of block b."""
    block = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    token = tl.arange(0, BLOCK_TOKENS).to(tl.int64)
    dim = tl.arange(0, BLOCK_DIM).to(tl.int64)
    mask = (token < TOKENS)[:, None] & (dim < HEAD_DIM)[None, :]
    source = codes + block * codes_block_stride + (token[:, None] * heads + head) * HEAD_DIM
    code = tl.load(source + dim[None, :], mask=mask, other=0).to(tl.int32)
    exponent = (code >> 3) & 15
    fraction = (code & 7).to(tl.float32)
    normal = ((code & 0x7F) << 20) + (120 << 23)
    size = tl.where(exponent == 0, fraction / 512.0, normal.to(tl.float32, bitcast=True))
    scale = _number(scales + block * scales_block_stride + head, True, tl.bfloat16)
    value = tl.where(code >= 0x80, -size, size) * scale
    target = out + block * out_block_stride + head * out_head_stride
    place = token[:, None] * out_token_stride + dim[None, :] * out_dim_stride
    tl.store(target + place, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _load(source, token, token_stride, dim, dim_stride, mask):
    """A tile in fp32, saturated; 0 where masked."""
    place = token[:, None] * token_stride + dim[None, :] * dim_stride
    tile = tl.load(source + place, mask=mask, other=0.0).to(tl.float32)
    saturated = tl.minimum(tl.maximum(tile, -_LARGEST), _LARGEST)
    return tl.where(tile == tile, saturated, tile)  # min and max drop NaN


@triton.jit
def _grid(tile, mask, LEVELS: tl.constexpr, AXIS: tl.constexpr):
    """Low and step of each group along AXIS, fp32 values that float16 and bfloat16 hold."""
    lowest = tl.min(tl.where(mask, tile, float("inf")), axis=AXIS)
    highest = tl.max(tl.where(mask, tile, float("-inf")), axis=AXIS)
    poison = tl.sum(_nan_or_zero(tile), axis=AXIS)
    low = _round_down_to_fp16(lowest)
    step = _round_up_to_bf16(tl.maximum((highest - low) / LEVELS, _SMALLEST_STEP))
    return low + poison, step


@triton.jit
def _nan_or_zero(tile):
    return tl.where(tile == tile, 0.0, tile)


@triton.jit
def _round_up_to_bf16(x):
    """The smallest bfloat16 that is not less, in fp32. x: positive or NaN."""
    nearest = x.to(tl.bfloat16).to(tl.float32)
    above = (nearest.to(tl.int32, bitcast=True) + 0x10000).to(tl.float32, bitcast=True)
    return tl.where(nearest < x, above, nearest)


@triton.jit
def _round_down_to_fp16(x):
    """The largest float16 that is not more, in fp32. x: inside float16's range."""
    nearest = x.to(tl.float16)
    bits = nearest.to(tl.int16, bitcast=True)
    # A negative x that rounds to zero gives -0, whose next bit pattern is the one below it.
    below = tl.where(nearest > 0, bits - 1, bits + 1).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.where(nearest.to(tl.float32) > x, below, nearest).to(tl.float32)


@triton.jit
def _nearest(x):
    """Integers nearest to x, ties to even; x: 0 to 255. NaN gives anything in a byte."""
    # Above 2²³ fp32 has integers only, and the integer is its lowest bits.
    return (x + 8388608.0).to(tl.int32, bitcast=True) & 0xFF


@triton.jit
def _bits(x, DTYPE: tl.constexpr):
    return x.to(DTYPE).to(tl.int16, bitcast=True)


@triton.jit
def _number(place, mask, DTYPE: tl.constexpr):
    return tl.load(place, mask=mask, other=0).to(DTYPE, bitcast=True).to(tl.float32)


def quantise(x: torch.Tensor, format: Format, side: Side) -> tuple[torch.Tensor, torch.Tensor]:
    """[blocks, tokens, heads, head_dim], any payload dtype → codes uint8, scales int16."""
    blocks, tokens, heads, head_dim = x.shape
    codes = x.new_empty((blocks, *codes_shape(format, tokens, heads, head_dim)), dtype=torch.uint8)
    shape = (blocks, *scales_shape(format, side, tokens, heads, head_dim))
    scales = x.new_empty(shape, dtype=torch.int16)
    if x.numel() == 0:
        return codes, scales
    with torch.cuda.device_of(x):
        if format == "fp8":
            quantise_fp8_kernel[(blocks, heads)](
                x, codes, scales, heads, *x.stride(), **_fp8_sizes(tokens, head_dim)
            )
        else:
            sizes = _sizes(format, side, tokens, head_dim)
            quantise_kernel[(blocks, heads, sizes["RUNS"])](
                x,
                codes,
                scales,
                heads,
                *x.stride(),
                **sizes,
                LEVELS=LEVELS[format],
                BLOCK_TOKENS=triton.next_power_of_2(tokens),
            )
    return codes, scales


def dequantise(
    codes: torch.Tensor, scales: torch.Tensor, format: Format, side: Side, out: torch.Tensor
) -> None:
    """Mutates: all of `out`, [blocks, tokens, heads, head_dim], any payload dtype."""
    blocks, tokens, heads, head_dim = out.shape
    if out.numel() == 0:
        return
    strides = (codes.stride(0), scales.stride(0), *out.stride())
    with torch.cuda.device_of(out):
        if format == "fp8":
            dequantise_fp8_kernel[(blocks, heads)](
                codes, scales, out, heads, *strides, **_fp8_sizes(tokens, head_dim)
            )
        else:
            sizes = _sizes(format, side, tokens, head_dim)
            dequantise_kernel[(blocks, heads, sizes["RUNS"])](
                codes, scales, out, heads, *strides, **sizes
            )


def _fp8_sizes(tokens: int, head_dim: int) -> dict[str, Any]:
    return {
        "TOKENS": tokens,
        "HEAD_DIM": head_dim,
        "BLOCK_TOKENS": triton.next_power_of_2(tokens),
        "BLOCK_DIM": triton.next_power_of_2(head_dim),
    }


def _sizes(format: Format, side: Side, tokens: int, head_dim: int) -> dict[str, Any]:
    run = run_dims(format, side, head_dim)
    parts = 2 if format == "int4" else 1
    return {
        "TOKENS": tokens,
        "RUN": run,
        "RUNS": head_dim // run,
        "PARTS": parts,
        "KEYS": side == "keys",
        "BLOCK_PART": triton.next_power_of_2(tokens // parts),
        "BLOCK_RUN": triton.next_power_of_2(run),
    }
