"""The two sides of the dot product, up to what one block's row adds, on any device."""

from __future__ import annotations

import torch

from kvws.kernels.rerope import rotate
from kvws.kernels.rotary import RotaryTable, Rotation, pairs, rotation_between

_VARIANCE_WEIGHT = 0.25
"""Half the variance of the logits is the second term of log-mean-exp; a pair whose phases are
spread evenly gives half of |q|²·var to it."""


def query_rows(queries: torch.Tensor, to_offsets: Rotation, kv_heads: int) -> torch.Tensor:
    """What a block's mean and variances are multiplied by, in one layer.

    Args:
        queries: [tokens, query_heads, head_dim], not rotated.
        to_offsets: the rotation that takes each token to its offset.

    Returns:
        [kv_heads, group·tokens, head_dim + pairs] float32, query head first: ⟨row, (mean,
        variances)⟩ = ⟨q, mean⟩/√d + ¼·Σ_pairs |q|²·variance/d.
    """
    tokens, query_heads, head_dim = queries.shape
    rotated = rotate(queries, to_offsets)
    a, b = pairs(rotated, to_offsets.rotary_dim, to_offsets.interleaved)
    energy = (a.square() + b.square()) * (_VARIANCE_WEIGHT / head_dim)
    rows = torch.cat([rotated * head_dim**-0.5, energy], dim=2)
    grouped = rows.view(tokens, kv_heads, query_heads // kv_heads, -1)
    return grouped.permute(1, 2, 0, 3).flatten(1, 2)


def turns(table: RotaryTable, distances: torch.Tensor) -> Rotation:
    """R(−D) for every distance D from 0 to the largest of some: a small table to look them up in.

    Args:
        distances: [n] int64, at least one.

    Raises:
        ValueError: one is negative, or not in the table.
    """
    nearest, farthest = (int(bound) for bound in torch.aminmax(distances))
    if nearest < 0:
        raise ValueError(f"distances must not be negative: expected at least 0, got {nearest}")
    every = torch.arange(farthest + 1, device=table.cos.device)
    return rotation_between(table, every, torch.zeros_like(every))
