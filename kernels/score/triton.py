"""Mean-K scores in Triton: normalisers of all rows first, then the mass of each block.

A row is one query token of one query head; the rows of a KV head's group are numbered
query head first, token second. Logits are never written to memory.
"""

# Triton types a constexpr parameter as constexpr, and is called with plain numbers.
# pyright: basic, reportArgumentType=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

BLOCK_ROWS = 32
BLOCK_BLOCKS = 64
NUM_WARPS = 8
"""Half as many would not hold the operands in registers."""


@triton.jit
def load_rows(
    queries, q_token_stride, q_head_stride, q_dim_stride, row, head, tokens, rows, dim,
    HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """[rows, dim] float32 queries; `head` is the first query head of the group, `dim` int64."""
    query_head = (head + row // tokens).to(tl.int64)
    offset = query_head * q_head_stride + (row % tokens).to(tl.int64) * q_token_stride
    mask = (row < rows)[:, None] & (dim < HEAD_DIM)[None, :]
    return tl.load(queries + offset[:, None] + dim[None, :] * q_dim_stride, mask=mask, other=0.0)


@triton.jit
def load_keys(
    tile, t_block_stride, t_dim_stride, block, is_candidate, dim, HEAD_DIM: tl.constexpr
):
    """[dim, blocks] float32 block means; what is not a candidate is not read. `dim` is int64.

    Upcast before the dot product, so that it is exact for half-precision tiles.
    """
    mask = (dim < HEAD_DIM)[:, None] & is_candidate[None, :]
    offset = block.to(tl.int64) * t_block_stride
    keys = tl.load(tile + offset[None, :] + dim[:, None] * t_dim_stride, mask=mask, other=0.0)
    return keys.to(tl.float32)


@triton.jit
def normalise_kernel(
    queries,
    tile,
    candidates,
    normaliser,
    scale,
    tokens,
    rows,
    blocks,
    kv_heads,
    q_layer_stride,
    q_token_stride,
    q_head_stride,
    q_dim_stride,
    t_layer_stride,
    t_head_stride,
    t_block_stride,
    t_dim_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_BLOCKS: tl.constexpr,
):
    """Folds one tile into `normaliser` [layers·kv_heads, rows], the log Σ exp so far.

    Program (i, j) serves rows [i·BLOCK_ROWS, …) of layer j // kv_heads, KV head j % kv_heads.
    """
    layer = (tl.program_id(1) // kv_heads).to(tl.int64)
    kv_head = tl.program_id(1) % kv_heads
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dim = tl.arange(0, BLOCK_DIM).to(tl.int64)
    q = load_rows(
        queries + layer * q_layer_stride, q_token_stride, q_head_stride, q_dim_stride,
        row, kv_head * (rows // tokens), tokens, rows, dim, HEAD_DIM,
    )  # fmt: skip
    q = q * scale
    tile += layer * t_layer_stride + kv_head.to(tl.int64) * t_head_stride
    slot = normaliser + tl.program_id(1).to(tl.int64) * rows + row
    peak = tl.load(slot, mask=row < rows, other=float("-inf"))
    total = tl.where(peak == float("-inf"), 0.0, 1.0)
    for start in range(0, blocks, BLOCK_BLOCKS):
        block = start + tl.arange(0, BLOCK_BLOCKS)
        is_candidate = tl.load(candidates + block, mask=block < blocks, other=0) != 0
        keys = load_keys(tile, t_block_stride, t_dim_stride, block, is_candidate, dim, HEAD_DIM)
        logits = tl.dot(q, keys, input_precision="ieee")
        logits = tl.where(is_candidate[None, :], logits, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logits, axis=1))
        # While no candidate was seen the peak is -inf, and -inf - -inf would be NaN.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        total = total * tl.exp(peak - base) + tl.sum(tl.exp(logits - base[:, None]), axis=1)
        peak = new_peak
    seen = total > 0.0
    result = tl.where(seen, peak + tl.log(tl.where(seen, total, 1.0)), float("-inf"))
    tl.store(slot, result, mask=row < rows)


@triton.jit
def accumulate_kernel(
    queries,
    tile,
    candidates,
    normaliser,
    partial,
    scale,
    tokens,
    rows,
    blocks,
    kv_heads,
    q_layer_stride,
    q_token_stride,
    q_head_stride,
    q_dim_stride,
    t_layer_stride,
    t_head_stride,
    t_block_stride,
    t_dim_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_BLOCKS: tl.constexpr,
):
    """Σ over rows of exp(logit - normaliser) into `partial` [layers·kv_heads, blocks].

    Program (i, j) owns blocks [i·BLOCK_BLOCKS, …) of layer j // kv_heads, KV head j % kv_heads:
    no atomics, so the result does not depend on the schedule.
    """
    layer = (tl.program_id(1) // kv_heads).to(tl.int64)
    kv_head = tl.program_id(1) % kv_heads
    block = tl.program_id(0) * BLOCK_BLOCKS + tl.arange(0, BLOCK_BLOCKS)
    dim = tl.arange(0, BLOCK_DIM).to(tl.int64)
    is_candidate = tl.load(candidates + block, mask=block < blocks, other=0) != 0
    tile += layer * t_layer_stride + kv_head.to(tl.int64) * t_head_stride
    keys = load_keys(tile, t_block_stride, t_dim_stride, block, is_candidate, dim, HEAD_DIM)
    queries += layer * q_layer_stride
    normaliser += tl.program_id(1).to(tl.int64) * rows
    mass = tl.zeros((BLOCK_BLOCKS,), dtype=tl.float32)
    for start in range(0, rows, BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        q = load_rows(
            queries, q_token_stride, q_head_stride, q_dim_stride,
            row, kv_head * (rows // tokens), tokens, rows, dim, HEAD_DIM,
        )  # fmt: skip
        logits = tl.dot(q * scale, keys, input_precision="ieee")
        # Rows past the end have an infinite normaliser, hence no mass.
        norm = tl.load(normaliser + row, mask=row < rows, other=float("inf"))
        weights = tl.exp(logits - norm[:, None])
        mass += tl.sum(tl.where(is_candidate[None, :], weights, 0.0), axis=0)
    target = partial + tl.program_id(1).to(tl.int64) * blocks + block
    tl.store(target, mass, mask=block < blocks)


def mean_k_scores(
    queries: torch.Tensor, tiles: Sequence[torch.Tensor], candidates: Sequence[torch.Tensor]
) -> torch.Tensor:
    """See the API. Extra memory: layers·kv_heads·(rows + blocks of the largest tile) floats."""
    layers, tokens, query_heads, head_dim = queries.shape
    kv_heads = tiles[0].shape[1]
    rows = query_heads // kv_heads * tokens
    scale = head_dim**-0.5
    device = queries.device
    masks = [mask.contiguous().view(torch.uint8) for mask in candidates]
    normaliser = torch.full((layers * kv_heads, rows), -torch.inf, device=device)
    shared = (tokens, rows)
    # tl.dot wants at least 16 along each side.
    meta = {
        "HEAD_DIM": head_dim,
        "BLOCK_DIM": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_ROWS": BLOCK_ROWS,
        "BLOCK_BLOCKS": BLOCK_BLOCKS,
        "num_warps": NUM_WARPS,
    }
    scores: list[torch.Tensor] = []
    with torch.cuda.device_of(queries):
        for tile, mask in zip(tiles, masks, strict=True):
            if mask.numel() == 0:
                continue
            normalise_kernel[(triton.cdiv(rows, BLOCK_ROWS), layers * kv_heads)](
                queries, tile, mask, normaliser, scale, *shared, mask.numel(), kv_heads,
                *queries.stride(), *tile.stride(), **meta,
            )  # fmt: skip
        for tile, mask in zip(tiles, masks, strict=True):
            blocks = mask.numel()
            if blocks == 0:
                continue
            partial = torch.empty((layers * kv_heads, blocks), device=device)
            accumulate_kernel[(triton.cdiv(blocks, BLOCK_BLOCKS), layers * kv_heads)](
                queries, tile, mask, normaliser, partial, scale, *shared, blocks, kv_heads,
                *queries.stride(), *tile.stride(), **meta,
            )  # fmt: skip
            scores.append(partial.sum(dim=0))
    return torch.cat(scores) if scores else torch.zeros(0, device=device)
