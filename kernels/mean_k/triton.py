"""Mean of rotated keys in Triton: a program per block and head."""

# Triton types a constexpr parameter as constexpr, and is called with plain numbers.
# pyright: basic, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvws.kernels.rotary import Rotation


@triton.jit
def mean_rotated_kernel(
    k,
    cos,
    sin,
    out,
    heads,
    k_block_stride,
    k_token_stride,
    k_head_stride,
    k_dim_stride,
    TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Program (b, h) writes out[b, h], out being a contiguous [blocks, heads, HEAD_DIM].

    Whatever meets a stride is int64: k may reach over more than 2³¹ elements along any axis.
    """
    block = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    token = tl.arange(0, BLOCK_TOKENS).to(tl.int64)
    is_token = token < TOKENS
    pair = tl.arange(0, BLOCK_PAIRS).to(tl.int64)
    is_pair = pair < HALF
    mask = is_token[:, None] & is_pair[None, :]
    angle = (block * TOKENS + token)[:, None] * HALF + pair[None, :]
    c = tl.load(cos + angle, mask=mask, other=0.0)
    s = tl.load(sin + angle, mask=mask, other=0.0)
    if INTERLEAVED:
        first = 2 * pair
        second = 2 * pair + 1
    else:
        first = pair
        second = pair + HALF
    source = k + block * k_block_stride + token[:, None] * k_token_stride + head * k_head_stride
    target = out + (block * heads + head) * HEAD_DIM
    a = tl.load(source + first[None, :] * k_dim_stride, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + second[None, :] * k_dim_stride, mask=mask, other=0.0).to(tl.float32)
    tl.store(target + first, tl.sum(a * c - b * s, axis=0) / TOKENS, mask=is_pair)
    tl.store(target + second, tl.sum(b * c + a * s, axis=0) / TOKENS, mask=is_pair)
    if BLOCK_REST > 0:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST).to(tl.int64)
        is_rest = rest < HEAD_DIM
        rest_mask = is_token[:, None] & is_rest[None, :]
        value = tl.load(source + rest[None, :] * k_dim_stride, mask=rest_mask, other=0.0)
        tl.store(target + rest, tl.sum(value.to(tl.float32), axis=0) / TOKENS, mask=is_rest)


def mean_rotated(k: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Mean over tokens of k after its rotation.

    Args:
        k: [blocks, block_tokens, heads, head_dim], any payload dtype.
        rotation: of the blocks·block_tokens tokens, in order.

    Returns:
        [blocks, heads, head_dim] float32.
    """
    blocks, block_tokens, heads, head_dim = k.shape
    half = rotation.rotary_dim // 2
    rest = head_dim - rotation.rotary_dim
    out = torch.empty((blocks, heads, head_dim), dtype=torch.float32, device=k.device)
    if out.numel() == 0:
        return out
    with torch.cuda.device_of(k):
        mean_rotated_kernel[(blocks, heads)](
            k,
            rotation.cos.contiguous(),
            rotation.sin.contiguous(),
            out,
            heads,
            *k.stride(),
            TOKENS=block_tokens,
            HEAD_DIM=head_dim,
            HALF=half,
            INTERLEAVED=rotation.interleaved,
            BLOCK_TOKENS=triton.next_power_of_2(block_tokens),
            BLOCK_PAIRS=triton.next_power_of_2(max(1, half)),
            BLOCK_REST=triton.next_power_of_2(rest) if rest else 0,
        )
    return out
