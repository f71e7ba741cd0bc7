"""Scores of blocks by mean and variance of their rotated keys, over an index in tiles."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvws.kernels.candidates import check_candidates
from kvws.kernels.dispatch import (
    PAYLOAD_DTYPES,
    Implementation,
    check_dtype,
    check_same_device,
    resolve,
)
from kvws.kernels.rotary import RotaryTable
from kvws.kernels.rotated_scores import reference


def rotated_scores(
    queries: torch.Tensor,
    offsets: torch.Tensor,
    tiles: Sequence[tuple[torch.Tensor, ...]],
    candidates: Sequence[torch.Tensor],
    distances: Sequence[torch.Tensor],
    rotary: Sequence[RotaryTable],
    *,
    implementation: Implementation = "auto",
) -> torch.Tensor:
    """How much of the query's softmax mass each candidate block draws, at its distance.

    With D the distance of block b and o the offset of query token t:

        score(b) = Σ_layers Σ_heads Σ_tokens softmax_b(
            ⟨R(o)·q_t, R(−D)·mean_b⟩/√head_dim + ¼·Σ_pairs |q_t|²·variance_b/head_dim )

    The softmax runs over the candidate blocks of all tiles together. Query head h reads KV head
    h // (query_heads / kv_heads). The sum of all scores is layers·query_heads·tokens.

    Args:
        queries: [layers, tokens, query_heads, head_dim] float32, not rotated.
        offsets: [tokens] int64: each token's position behind where distances are counted from.
        tiles: of each the means [layers, kv_heads, tile_blocks, head_dim] of keys rotated to
            their offset in the block, and the variances [layers, kv_heads, tile_blocks, pairs]
            of each rotary pair; all of one dtype, float32, float16 or bfloat16.
        candidates: each [tile_blocks] bool, one per tile. Entries of other blocks are never
            read, so they may be uninitialised.
        distances: each [tile_blocks] int64, one per tile, of candidates from 0 up to the last
            position of the table.
        rotary: the table of each layer, on the queries' device; all with so many pairs.

    Returns:
        [blocks of all tiles, in order] float32; exactly 0 where not a candidate.

    Raises:
        ConfigError: the implementation or a dtype is not supported.
        ValueError: a shape or a device contradicts another one, or a position is not in a table.
    """
    chosen = resolve(implementation, queries)
    _check_queries(queries, offsets, rotary)
    _check_tiles(queries, tiles, candidates, distances, rotary)
    if not tiles or queries.numel() == 0:
        blocks = sum(mask.numel() for mask in candidates)
        return torch.zeros(blocks, dtype=torch.float32, device=queries.device)
    if chosen == "reference":
        return reference.rotated_scores(queries, offsets, tiles, candidates, distances, rotary)
    from kvws.kernels.rotated_scores import triton

    return triton.rotated_scores(queries, offsets, tiles, candidates, distances, rotary)


def _check_queries(
    queries: torch.Tensor, offsets: torch.Tensor, rotary: Sequence[RotaryTable]
) -> None:
    check_dtype("queries", queries, (torch.float32,))
    if queries.dim() != 4:
        raise ValueError(
            f"queries must be [layers, tokens, query_heads, head_dim], got {tuple(queries.shape)}"
        )
    layers, tokens, _, head_dim = queries.shape
    if offsets.shape != (tokens,) or offsets.dtype != torch.int64:
        raise ValueError(
            f"offsets must be one int64 per token: expected ({tokens},) torch.int64, "
            f"got {tuple(offsets.shape)} {offsets.dtype}"
        )
    if len(rotary) != layers:
        raise ValueError(
            f"rotary must have one table per layer: expected {layers}, got {len(rotary)}"
        )
    for table in {id(table): table for table in rotary}.values():
        if table.rotary_dim != rotary[0].rotary_dim or table.rotary_dim > head_dim:
            raise ValueError(
                f"tables must rotate as many of {head_dim} dimensions in every layer: "
                f"expected {rotary[0].rotary_dim}, got {table.rotary_dim}"
            )
        check_same_device(queries=queries, offsets=offsets, rotary=table.cos)


def _check_tiles(
    queries: torch.Tensor,
    tiles: Sequence[tuple[torch.Tensor, ...]],
    candidates: Sequence[torch.Tensor],
    distances: Sequence[torch.Tensor],
    rotary: Sequence[RotaryTable],
) -> None:
    check_candidates([parts[0].shape[2:3] for parts in tiles], candidates)
    if len(distances) != len(candidates):
        raise ValueError(
            f"distances must be given per tile: expected {len(candidates)}, got {len(distances)}"
        )
    if not tiles:
        return
    layers, _, query_heads, head_dim = queries.shape
    means = tiles[0][0]
    check_dtype("means", means, PAYLOAD_DTYPES)
    kv_heads = means.shape[1] if means.dim() == 4 else 0
    if kv_heads == 0 or query_heads % kv_heads:
        raise ValueError(
            f"query_heads must be a multiple of kv_heads: expected a multiple of {kv_heads}, "
            f"got {query_heads}"
        )
    last = (head_dim, rotary[0].rotary_dim // 2) if rotary else (head_dim, 0)
    for number, (parts, mask, away) in enumerate(zip(tiles, candidates, distances, strict=True)):
        expected = [(layers, kv_heads, mask.numel(), width) for width in last]
        if [tuple(part.shape) for part in parts] != expected:
            raise ValueError(
                f"tiles[{number}] must be means and variances: expected {expected[0]} and "
                f"{expected[1]}, got {' and '.join(str(tuple(part.shape)) for part in parts)}"
            )
        if any(part.dtype != means.dtype for part in parts):
            raise ValueError(
                f"tiles[{number}] must have the first means' dtype: expected {means.dtype}, "
                f"got {' and '.join(str(part.dtype) for part in parts)}"
            )
        if away.shape != mask.shape or away.dtype != torch.int64:
            raise ValueError(
                f"distances[{number}] must be one int64 per block: expected "
                f"{tuple(mask.shape)} torch.int64, got {tuple(away.shape)} {away.dtype}"
            )
        named = {"means": parts[0], "variances": parts[1], "candidates": mask, "distances": away}
        check_same_device(queries=queries, **named)
