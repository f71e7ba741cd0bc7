"""Mean-K scores of blocks, over an index that comes in tiles."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvws.kernels.dispatch import (
    PAYLOAD_DTYPES,
    Implementation,
    check_dtype,
    check_same_device,
    resolve,
)
from kvws.kernels.score import reference


def mean_k_scores(
    queries: torch.Tensor,
    tiles: Sequence[torch.Tensor],
    candidates: Sequence[torch.Tensor],
    *,
    implementation: Implementation = "auto",
) -> torch.Tensor:
    """How much of the query's softmax mass each candidate block draws, by Mean-K.

        score(b) = Σ_layers Σ_heads Σ_tokens softmax_b(q · k̄_b / √head_dim)

    The softmax runs over the candidate blocks of all tiles together. Query head h reads KV head
    h // (query_heads / kv_heads). KVMem averages over layers and heads: divide by
    layers·query_heads, summed over all tensor-parallel ranks, each of which holds a share of
    the heads. The sum of all scores here is layers·query_heads·tokens.

    Args:
        queries: [layers, tokens, query_heads, head_dim] float32, not rotated.
        tiles: each [layers, kv_heads, tile_blocks, head_dim] float32, float16 or bfloat16: block
            means of un-rotated K. Tiles may differ in tile_blocks, not in dtype.
        candidates: each [tile_blocks] bool, one per tile. Entries of other blocks are never
            read, so they may be uninitialised.

    Returns:
        [blocks of all tiles, in order] float32; exactly 0 where not a candidate.

    Raises:
        ConfigError: the implementation or a dtype is not supported.
        ValueError: a shape or a device contradicts another one.
    """
    chosen = resolve(implementation, queries)
    _check(queries, tiles, candidates)
    if not tiles or queries.numel() == 0:
        blocks = sum(mask.numel() for mask in candidates)
        return torch.zeros(blocks, dtype=torch.float32, device=queries.device)
    if chosen == "reference":
        return reference.mean_k_scores(queries, tiles, candidates)
    from kvws.kernels.score import triton

    return triton.mean_k_scores(queries, tiles, candidates)


def _check(
    queries: torch.Tensor, tiles: Sequence[torch.Tensor], candidates: Sequence[torch.Tensor]
) -> None:
    check_dtype("queries", queries, (torch.float32,))
    if queries.dim() != 4:
        raise ValueError(
            f"queries must be [layers, tokens, query_heads, head_dim], got {tuple(queries.shape)}"
        )
    if len(tiles) != len(candidates):
        raise ValueError(
            f"candidates must have one mask per tile: expected {len(tiles)}, got {len(candidates)}"
        )
    layers, _, query_heads, head_dim = queries.shape
    kv_heads = tiles[0].shape[1] if tiles and tiles[0].dim() == 4 else 0
    for i, (tile, mask) in enumerate(zip(tiles, candidates, strict=True)):
        check_dtype(f"tiles[{i}]", tile, PAYLOAD_DTYPES)
        if tile.dim() != 4 or tile.shape[::3] != (layers, head_dim) or tile.shape[1] != kv_heads:
            raise ValueError(
                f"tiles[{i}] must be [layers, kv_heads, tile_blocks, head_dim]: expected "
                f"[{layers}, {kv_heads or 'kv_heads'}, tile_blocks, {head_dim}], "
                f"got {tuple(tile.shape)}"
            )
        if kv_heads == 0 or query_heads % kv_heads:
            raise ValueError(
                f"query_heads must be a multiple of kv_heads: expected a multiple of "
                f"{kv_heads}, got {query_heads}"
            )
        if mask.shape != tile.shape[2:3] or mask.dtype != torch.bool:
            raise ValueError(
                f"candidates[{i}] must be one bool per block: expected ({tile.shape[2]},) "
                f"torch.bool, got {tuple(mask.shape)} {mask.dtype}"
            )
        if tile.dtype != tiles[0].dtype:
            raise ValueError(
                f"tiles[{i}] must have the first tile's dtype: expected {tiles[0].dtype}, "
                f"got {tile.dtype}"
            )
        check_same_device(queries=queries, **{f"tiles[{i}]": tile, f"candidates[{i}]": mask})
