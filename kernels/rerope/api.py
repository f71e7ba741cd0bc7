"""Rotate keys, into a new tensor or into the rows of a KV pool."""

from __future__ import annotations

import torch

from kvws.kernels.dispatch import (
    PAYLOAD_DTYPES,
    Implementation,
    check_dtype,
    check_same_device,
    resolve,
)
from kvws.kernels.rerope import reference
from kvws.kernels.rotary import Rotation


def rotate(
    x: torch.Tensor,
    rotation: Rotation,
    *,
    out_dtype: torch.dtype | None = None,
    implementation: Implementation = "auto",
) -> torch.Tensor:
    """Keys after their rotation, computed in fp32 and rounded once.

    Tokens that do not move keep their bits when the dtype stays.

    Args:
        x: [n, heads, head_dim] float32, float16 or bfloat16. Dimensions from the rotation's
            rotary_dim on pass through.
        rotation: one rotation per token, on x's device.
        out_dtype: dtype of the result; x's when None.

    Returns:
        [n, heads, head_dim] out_dtype, contiguous, never sharing memory with x.

    Raises:
        ConfigError: the implementation or a dtype is not supported.
        ValueError: a shape or a device contradicts another one.
    """
    chosen = resolve(implementation, x)
    _check_keys(x, rotation)
    out = torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)
    check_dtype("out_dtype", out, PAYLOAD_DTYPES)
    if chosen == "reference":
        reference.rotate(out, x, rotation)
    else:
        from kvws.kernels.rerope import triton

        triton.rotate(out, None, x, rotation)
    return out


def scatter_rotated(
    pool: torch.Tensor,
    slots: torch.Tensor,
    x: torch.Tensor,
    rotation: Rotation,
    *,
    implementation: Implementation = "auto",
) -> None:
    """Keys into pool rows: pool[slots[i]] = rotate(x[i]).

    Mutates: the rows of `pool` named by `slots`, and no others.

    Args:
        pool: [slots, heads, head_dim] float32, float16 or bfloat16: one layer's K buffer.
        slots: [n] int64, distinct. Bounds are checked on the CPU only: on a GPU the check would
            wait for the stream, so there they are the caller's duty.
        x: [n, heads, head_dim] float32, float16 or bfloat16; need not be contiguous. Must not
            overlap the pool.
        rotation: one rotation per token, on x's device. An identity copies bits.

    Raises:
        ConfigError: the implementation or a dtype is not supported.
        ValueError: a shape, a device or a slot contradicts the pool.
    """
    chosen = resolve(implementation, x)
    _check_keys(x, rotation)
    _check_pool(pool, slots, x)
    if chosen == "reference":
        reference.scatter_rotated(pool, slots, x, rotation)
    else:
        from kvws.kernels.rerope import triton

        triton.rotate(pool, slots, x, rotation)


def _check_keys(x: torch.Tensor, rotation: Rotation) -> None:
    check_dtype("x", x, PAYLOAD_DTYPES)
    if x.dim() != 3:
        raise ValueError(f"x must be [n, heads, head_dim], got {tuple(x.shape)}")
    if rotation.tokens != x.shape[0]:
        raise ValueError(
            f"rotation must have one row per token: expected {x.shape[0]}, got {rotation.tokens}"
        )
    if rotation.rotary_dim > x.shape[2]:
        raise ValueError(
            f"rotary_dim must not exceed head_dim: expected at most {x.shape[2]}, "
            f"got {rotation.rotary_dim}"
        )
    check_same_device(x=x, rotation=rotation.cos)


def _check_pool(pool: torch.Tensor, slots: torch.Tensor, x: torch.Tensor) -> None:
    check_dtype("pool", pool, PAYLOAD_DTYPES)
    if pool.dim() != 3 or pool.shape[1:] != x.shape[1:]:
        raise ValueError(
            f"pool must be [slots, heads, head_dim] with x's heads and head_dim: expected "
            f"[slots, {x.shape[1]}, {x.shape[2]}], got {tuple(pool.shape)}"
        )
    if slots.shape != x.shape[:1] or slots.dtype != torch.int64:
        raise ValueError(
            f"slots must be one int64 per token: expected ({x.shape[0]},) torch.int64, "
            f"got {tuple(slots.shape)} {slots.dtype}"
        )
    check_same_device(x=x, pool=pool, slots=slots)
    if slots.device.type == "cpu" and slots.numel():
        low, high = (int(bound) for bound in torch.aminmax(slots))
        if low < 0 or high >= pool.shape[0]:
            raise ValueError(
                f"slots must lie inside the pool: expected 0 to {pool.shape[0] - 1}, "
                f"got {low} to {high}"
            )
