"""Rotated scores in Triton: normalisers of all rows first, then the mass of each block.

A row is one query token of one query head; the rows of a KV head's group are numbered query head
first, token second. Neither rotated means nor logits are ever written to memory.
"""

# Triton types a constexpr parameter as constexpr, and is called with plain numbers; what its
# functions return has no type at all.
# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvws.kernels.candidates import places, spread
from kvws.kernels.rotary import RotaryTable, rotation_between
from kvws.kernels.rotated_scores.sides import query_rows, turns

BLOCK_ROWS = 16
BLOCK_BLOCKS = 32


@triton.jit
def load_keys(
    means, m_block_stride, m_dim_stride, variances, v_block_stride, v_pair_stride,
    cos, sin, blocks, distances, candidate, count,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    """Both halves of the means at their distance, and the variances: [pairs, blocks] float32
    each; what is not a candidate is not read."""
    pair = tl.arange(0, BLOCK_PAIRS).to(tl.int64)
    is_candidate = candidate < count
    mask = (pair < HALF)[:, None] & is_candidate[None, :]
    block = tl.load(blocks + candidate, mask=is_candidate, other=0)
    distance = tl.load(distances + candidate, mask=is_candidate, other=0)
    turn = distance[None, :] * HALF + pair[:, None]
    c = tl.load(cos + turn, mask=mask, other=0.0)
    s = tl.load(sin + turn, mask=mask, other=0.0)
    if INTERLEAVED:
        first = 2 * pair
        second = 2 * pair + 1
    else:
        first = pair
        second = pair + HALF
    source = means + block[None, :] * m_block_stride
    a = tl.load(source + first[:, None] * m_dim_stride, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + second[:, None] * m_dim_stride, mask=mask, other=0.0).to(tl.float32)
    at = block[None, :] * v_block_stride + pair[:, None] * v_pair_stride
    spreads = tl.load(variances + at, mask=mask, other=0.0).to(tl.float32)
    return a * c - b * s, b * c + a * s, spreads


@triton.jit
def load_rest(
    means, m_block_stride, m_dim_stride, blocks, candidate, count,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """The dimensions that pass through: [rest, blocks] float32."""
    dim = 2 * HALF + tl.arange(0, BLOCK_REST).to(tl.int64)
    is_candidate = candidate < count
    block = tl.load(blocks + candidate, mask=is_candidate, other=0)
    source = means + block[None, :] * m_block_stride + dim[:, None] * m_dim_stride
    mask = (dim < HEAD_DIM)[:, None] & is_candidate[None, :]
    return tl.load(source, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def row_logits(
    rows, row, row_count, a, b, spreads, rest,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """[rows, blocks] float32. `rows`: of one KV head, [row_count, HEAD_DIM + HALF] contiguous."""
    pair = tl.arange(0, BLOCK_PAIRS)
    mask = (row < row_count)[:, None] & (pair < HALF)[None, :]
    if INTERLEAVED:
        first = 2 * pair
        second = 2 * pair + 1
    else:
        first = pair
        second = pair + HALF
    source = rows + row.to(tl.int64)[:, None] * (HEAD_DIM + HALF)
    q = tl.load(source + first[None, :], mask=mask, other=0.0)
    logits = tl.dot(q, a, input_precision="tf32x3")
    q = tl.load(source + second[None, :], mask=mask, other=0.0)
    logits = tl.dot(q, b, logits, input_precision="tf32x3")
    q = tl.load(source + (HEAD_DIM + pair)[None, :], mask=mask, other=0.0)
    logits = tl.dot(q, spreads, logits, input_precision="tf32x3")
    if BLOCK_REST > 0:
        dim = 2 * HALF + tl.arange(0, BLOCK_REST)
        mask = (row < row_count)[:, None] & (dim < HEAD_DIM)[None, :]
        q = tl.load(source + dim[None, :], mask=mask, other=0.0)
        logits = tl.dot(q, rest, logits, input_precision="tf32x3")
    return logits


@triton.jit
def normalise_kernel(
    rows,
    means,
    variances,
    cos,
    sin,
    layers,
    blocks,
    distances,
    normaliser,
    row_count,
    count,
    kv_heads,
    m_layer_stride,
    m_head_stride,
    m_block_stride,
    m_dim_stride,
    v_layer_stride,
    v_head_stride,
    v_block_stride,
    v_pair_stride,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_BLOCKS: tl.constexpr,
):
    """Folds the candidates of one tile into `normaliser` [layers·kv_heads, rows], the log Σ exp
    so far.

    Program (i, j) serves rows [i·BLOCK_ROWS, …) of KV head j % kv_heads in the layer that
    `layers` names at j // kv_heads; `rows` and `normaliser` are in the order of `layers`.
    Whatever meets a stride is int64.
    """
    place = tl.program_id(1).to(tl.int64)
    layer = tl.load(layers + place // kv_heads)
    kv_head = place % kv_heads
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    rows += place * row_count * (HEAD_DIM + HALF)
    means += layer * m_layer_stride + kv_head * m_head_stride
    variances += layer * v_layer_stride + kv_head * v_head_stride
    slot = normaliser + place * row_count + row
    peak = tl.load(slot, mask=row < row_count, other=float("-inf"))
    total = tl.where(peak == float("-inf"), 0.0, 1.0)
    for start in range(0, count, BLOCK_BLOCKS):
        candidate = start + tl.arange(0, BLOCK_BLOCKS)
        a, b, spreads = load_keys(
            means, m_block_stride, m_dim_stride, variances, v_block_stride, v_pair_stride,
            cos, sin, blocks, distances, candidate, count, HALF, INTERLEAVED, BLOCK_PAIRS,
        )  # fmt: skip
        rest = a
        if BLOCK_REST > 0:
            rest = load_rest(
                means, m_block_stride, m_dim_stride, blocks, candidate, count,
                HEAD_DIM, HALF, BLOCK_REST,
            )  # fmt: skip
        logits = row_logits(
            rows, row, row_count, a, b, spreads, rest,
            HEAD_DIM, HALF, INTERLEAVED, BLOCK_PAIRS, BLOCK_REST,
        )  # fmt: skip
        logits = tl.where((candidate < count)[None, :], logits, float("-inf"))
        # Every step has a candidate, so the new peak is finite.
        new_peak = tl.maximum(peak, tl.max(logits, axis=1))
        total = total * tl.exp(peak - new_peak) + tl.sum(tl.exp(logits - new_peak[:, None]), 1)
        peak = new_peak
    tl.store(slot, peak + tl.log(total), mask=row < row_count)


@triton.jit
def accumulate_kernel(
    rows,
    means,
    variances,
    cos,
    sin,
    layers,
    blocks,
    distances,
    normaliser,
    partial,
    row_count,
    count,
    kv_heads,
    m_layer_stride,
    m_head_stride,
    m_block_stride,
    m_dim_stride,
    v_layer_stride,
    v_head_stride,
    v_block_stride,
    v_pair_stride,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_BLOCKS: tl.constexpr,
):
    """Σ over rows of exp(logit - normaliser) into `partial` [layers·kv_heads, count].

    Program (i, j) owns candidates [i·BLOCK_BLOCKS, …) of KV head j % kv_heads in the layer that
    `layers` names at j // kv_heads: no atomics, so the result does not depend on the schedule.
    """
    place = tl.program_id(1).to(tl.int64)
    layer = tl.load(layers + place // kv_heads)
    kv_head = place % kv_heads
    candidate = tl.program_id(0) * BLOCK_BLOCKS + tl.arange(0, BLOCK_BLOCKS)
    means += layer * m_layer_stride + kv_head * m_head_stride
    variances += layer * v_layer_stride + kv_head * v_head_stride
    a, b, spreads = load_keys(
        means, m_block_stride, m_dim_stride, variances, v_block_stride, v_pair_stride,
        cos, sin, blocks, distances, candidate, count, HALF, INTERLEAVED, BLOCK_PAIRS,
    )  # fmt: skip
    rest = a
    if BLOCK_REST > 0:
        rest = load_rest(
            means, m_block_stride, m_dim_stride, blocks, candidate, count,
            HEAD_DIM, HALF, BLOCK_REST,
        )  # fmt: skip
    rows += place * row_count * (HEAD_DIM + HALF)
    normaliser += place * row_count
    mass = tl.zeros((BLOCK_BLOCKS,), dtype=tl.float32)
    for start in range(0, row_count, BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        logits = row_logits(
            rows, row, row_count, a, b, spreads, rest,
            HEAD_DIM, HALF, INTERLEAVED, BLOCK_PAIRS, BLOCK_REST,
        )  # fmt: skip
        # Rows past the end have an infinite normaliser, hence no mass.
        norm = tl.load(normaliser + row, mask=row < row_count, other=float("inf"))
        mass += tl.sum(tl.exp(logits - norm[:, None]), axis=0)
    tl.store(partial + place * count + candidate, mass, mask=candidate < count)


def rotated_scores(
    queries: torch.Tensor,
    offsets: torch.Tensor,
    tiles: Sequence[tuple[torch.Tensor, ...]],
    candidates: Sequence[torch.Tensor],
    distances: Sequence[torch.Tensor],
    rotary: Sequence[RotaryTable],
) -> torch.Tensor:
    """See the API. Extra memory: layers·kv_heads·(rows·(head_dim + pairs) + candidates of the
    largest tile) floats."""
    found = places(candidates)
    away = [far.index_select(0, blocks) for far, blocks in zip(distances, found, strict=True)]
    count = sum(blocks.numel() for blocks in found)
    sums = queries.new_zeros(count)
    if count:
        with torch.cuda.device_of(queries):
            for table in {id(table): table for table in rotary}.values():
                layers = [layer for layer, other in enumerate(rotary) if other is table]
                sums += _of_layers(queries, offsets, tiles, found, away, table, layers)
    return spread(candidates, sums)


def _of_layers(
    queries: torch.Tensor,
    offsets: torch.Tensor,
    tiles: Sequence[tuple[torch.Tensor, ...]],
    found: Sequence[torch.Tensor],
    away: Sequence[torch.Tensor],
    table: RotaryTable,
    layers: list[int],
) -> torch.Tensor:
    """Of the layers that share a table: [candidates]."""
    kv_heads, head_dim = tiles[0][0].shape[1], tiles[0][0].shape[3]
    half = table.rotary_dim // 2
    turn = turns(table, torch.cat(list(away)))
    to_offsets = rotation_between(table, None, offsets)
    rows = torch.cat([query_rows(queries[layer], to_offsets, kv_heads) for layer in layers])
    programs, row_count, _ = rows.shape
    named = torch.tensor(layers, device=rows.device)
    normaliser = torch.full((programs, row_count), -torch.inf, device=rows.device)
    # tl.dot wants at least 16 along each side.
    meta = {
        "HEAD_DIM": head_dim,
        "HALF": half,
        "INTERLEAVED": table.interleaved,
        "BLOCK_PAIRS": max(16, triton.next_power_of_2(half)),
        "BLOCK_REST": max(16, triton.next_power_of_2(head_dim - 2 * half))
        if head_dim > 2 * half
        else 0,
        "BLOCK_ROWS": BLOCK_ROWS,
        "BLOCK_BLOCKS": BLOCK_BLOCKS,
    }
    used = [
        (parts, blocks, far)
        for parts, blocks, far in zip(tiles, found, away, strict=True)
        if blocks.numel()
    ]
    for (means, variances), blocks, far in used:
        normalise_kernel[(triton.cdiv(row_count, BLOCK_ROWS), programs)](
            rows, means, variances, turn.cos, turn.sin, named, blocks, far, normaliser,
            row_count, blocks.numel(), kv_heads, *means.stride(), *variances.stride(), **meta,
        )  # fmt: skip
    sums: list[torch.Tensor] = []
    for (means, variances), blocks, far in used:
        partial = torch.empty((programs, blocks.numel()), device=rows.device)
        accumulate_kernel[(triton.cdiv(blocks.numel(), BLOCK_BLOCKS), programs)](
            rows, means, variances, turn.cos, turn.sin, named, blocks, far, normaliser, partial,
            row_count, blocks.numel(), kv_heads, *means.stride(), *variances.stride(), **meta,
        )  # fmt: skip
        sums.append(partial.sum(dim=0))
    return torch.cat(sums)
