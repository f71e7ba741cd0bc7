"""Rotation in Triton: one pass over the keys, straight into the pool's rows."""

# Triton types a constexpr parameter as constexpr, and is called with plain numbers.
# pyright: basic, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvws.kernels.rotary import Rotation

BLOCK_TOKENS = 16


@triton.jit
def rotate_kernel(
    x,
    out,
    slots,
    cos,
    sin,
    tokens,
    heads,
    x_token_stride,
    x_head_stride,
    x_dim_stride,
    out_token_stride,
    out_head_stride,
    out_dim_stride,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SCATTER: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Program i rotates tokens [i·BLOCK_TOKENS, (i + 1)·BLOCK_TOKENS) in all heads.

    Whatever meets a stride is int64: a pool may hold more than 2³¹ elements, and reach over them
    along any axis.
    """
    token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    is_token = token < tokens
    row = token
    if SCATTER:
        row = tl.load(slots + token, mask=is_token, other=0)
    pair = tl.arange(0, BLOCK_PAIRS).to(tl.int64)
    mask = is_token[:, None] & (pair < HALF)[None, :]
    angle = token[:, None] * HALF + pair[None, :]
    c = tl.load(cos + angle, mask=mask, other=1.0)
    s = tl.load(sin + angle, mask=mask, other=0.0)
    still = (c == 1.0) & (s == 0.0)
    if INTERLEAVED:
        first = 2 * pair
        second = 2 * pair + 1
    else:
        first = pair
        second = pair + HALF
    for head in range(heads):
        wide_head = tl.cast(head, tl.int64)
        source = x + token[:, None] * x_token_stride + wide_head * x_head_stride
        target = out + row[:, None] * out_token_stride + wide_head * out_head_stride
        a = tl.load(source + first[None, :] * x_dim_stride, mask=mask, other=0.0)
        b = tl.load(source + second[None, :] * x_dim_stride, mask=mask, other=0.0)
        a = a.to(tl.float32)
        b = b.to(tl.float32)
        # A pair that stays is passed on untouched: -0 and non-finite values survive as well.
        new_a = tl.where(still, a, a * c - b * s).to(out.dtype.element_ty)
        new_b = tl.where(still, b, b * c + a * s).to(out.dtype.element_ty)
        tl.store(target + first[None, :] * out_dim_stride, new_a, mask=mask)
        tl.store(target + second[None, :] * out_dim_stride, new_b, mask=mask)
        if BLOCK_REST > 0:
            rest = 2 * HALF + tl.arange(0, BLOCK_REST).to(tl.int64)
            rest_mask = is_token[:, None] & (rest < HEAD_DIM)[None, :]
            value = tl.load(source + rest[None, :] * x_dim_stride, mask=rest_mask, other=0.0)
            tl.store(
                target + rest[None, :] * out_dim_stride,
                value.to(tl.float32).to(out.dtype.element_ty),
                mask=rest_mask,
            )


def rotate(
    out: torch.Tensor, slots: torch.Tensor | None, x: torch.Tensor, rotation: Rotation
) -> None:
    """out[slots[i]] = rotated x[i], or out[i] without slots. Mutates: those rows of `out`.

    Args:
        out: [rows, heads, head_dim], any payload dtype.
        slots: [n] int64 or None.
        x: [n, heads, head_dim], any payload dtype.
    """
    tokens, heads, head_dim = x.shape
    half = rotation.rotary_dim // 2
    rest = head_dim - rotation.rotary_dim
    if x.numel() == 0:
        return
    with torch.cuda.device_of(x):
        rotate_kernel[(triton.cdiv(tokens, BLOCK_TOKENS),)](
            x,
            out,
            x if slots is None else slots.contiguous(),
            rotation.cos.contiguous(),
            rotation.sin.contiguous(),
            tokens,
            heads,
            *x.stride(),
            *out.stride(),
            HEAD_DIM=head_dim,
            HALF=half,
            INTERLEAVED=rotation.interleaved,
            SCATTER=slots is not None,
            BLOCK_TOKENS=BLOCK_TOKENS,
            BLOCK_PAIRS=triton.next_power_of_2(max(1, half)),
            BLOCK_REST=triton.next_power_of_2(rest) if rest else 0,
        )
