"""Mean of a block's keys with their rotation taken out."""

from __future__ import annotations

import torch

from kvws.kernels.dispatch import (
    PAYLOAD_DTYPES,
    Implementation,
    check_dtype,
    check_same_device,
    resolve,
)
from kvws.kernels.mean_k import reference
from kvws.kernels.rotary import RotaryTable, Rotation, rotation_between


def mean_raw_k(
    k: torch.Tensor,
    first_positions: torch.Tensor,
    rotary: RotaryTable,
    *,
    implementation: Implementation = "auto",
) -> torch.Tensor:
    """Mean over each block's tokens of the un-rotated K, for one layer.

    Token j of block b is baked at position first_positions[b] + j. For several layers at the
    same positions call `raw_rotation` once and `mean_rotated` per layer.

    Args:
        k: [blocks, block_tokens, heads, head_dim] float32, float16 or bfloat16, as stored.
        first_positions: [blocks] int64.
        rotary: the table the keys were rotated with, on k's device.

    Returns:
        [blocks, heads, head_dim] float32.

    Raises:
        ConfigError: the implementation or a dtype is not supported.
        ValueError: a shape or a device contradicts another one, or a position is not in the table.
    """
    resolve(implementation, k)
    _check_blocks(k)
    if first_positions.shape != k.shape[:1] or first_positions.dtype != torch.int64:
        raise ValueError(
            f"first_positions must be one int64 per block: expected ({k.shape[0]},) torch.int64, "
            f"got {tuple(first_positions.shape)} {first_positions.dtype}"
        )
    check_same_device(k=k, first_positions=first_positions, rotary=rotary.cos)
    rotation = raw_rotation(first_positions, k.shape[1], rotary)
    return mean_rotated(k, rotation, implementation=implementation)


def raw_rotation(
    first_positions: torch.Tensor, block_tokens: int, rotary: RotaryTable
) -> Rotation:
    """The rotation that makes blocks raw: of blocks·block_tokens tokens, block after block.

    Args:
        first_positions: [blocks] int64: token j of block b is baked at first_positions[b] + j.
        block_tokens: tokens in a block.
        rotary: the table the keys were rotated with.

    Raises:
        ValueError: a position is not in the table.
    """
    offsets = torch.arange(block_tokens, device=first_positions.device)
    return rotation_between(rotary, (first_positions.unsqueeze(1) + offsets).flatten(), None)


def mean_rotated(
    k: torch.Tensor, rotation: Rotation, *, implementation: Implementation = "auto"
) -> torch.Tensor:
    """Mean over each block's tokens of K after its rotation, for one layer.

    Rotating is linear, so it is folded into the mean: keys are read once and no rotated copy of
    them is kept.

    Args:
        k: [blocks, block_tokens, heads, head_dim] float32, float16 or bfloat16.
        rotation: of the blocks·block_tokens tokens, block after block, on k's device.

    Returns:
        [blocks, heads, head_dim] float32.

    Raises:
        ConfigError: the implementation or a dtype is not supported.
        ValueError: a shape or a device contradicts another one.
    """
    chosen = resolve(implementation, k)
    _check_blocks(k)
    if rotation.tokens != k.shape[0] * k.shape[1]:
        raise ValueError(
            f"rotation must have one row per token: expected {k.shape[0] * k.shape[1]}, "
            f"got {rotation.tokens}"
        )
    if rotation.rotary_dim > k.shape[3]:
        raise ValueError(
            f"rotary_dim must not exceed head_dim: expected at most {k.shape[3]}, "
            f"got {rotation.rotary_dim}"
        )
    check_same_device(k=k, rotation=rotation.cos)
    if chosen == "reference":
        return reference.mean_rotated(k, rotation)
    from kvws.kernels.mean_k import triton

    return triton.mean_rotated(k, rotation)


def _check_blocks(k: torch.Tensor) -> None:
    check_dtype("k", k, PAYLOAD_DTYPES)
    if k.dim() != 4 or k.shape[1] == 0:
        raise ValueError(
            f"k must be [blocks, block_tokens, heads, head_dim] with at least one token a block, "
            f"got {tuple(k.shape)}"
        )
