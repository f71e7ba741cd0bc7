"""Cases whose operands hold more than 2³¹ elements: offsets into them need 64 bits.

An index of 312,500 blocks does. GPUs alone: elsewhere the interpreter's tests fake the distance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from kvws.bench.gpu.case import (
    BLOCK_TOKENS,
    Case,
    Prepared,
    Sizes,
    Tensors,
    random_normal,
    within_rounding,
)
from kvws.bench.gpu.quant_cases import codes_alike
from kvws.bench.gpu.rotary_tables import POSITIONS, checked_tables
from kvws.bench.gpu.score_cases import WHOLE, mean_k, rotated, token
from kvws.kernels.dispatch import Implementation
from kvws.kernels.mean_k import mean_rotated, raw_rotation
from kvws.kernels.quant import quantise
from kvws.kernels.rerope import rotation_between, scatter_rotated

_FAR_BLOCKS = 65_536 + 5
"""Of 32 tokens in 8 heads of 128: a little more than 2³¹ elements."""

_GB = 1 << 30


def far_cases() -> Iterator[Case]:
    blocks, tokens = (f"more than 2³¹ elements, {of}" for of in ("blocks", "heads first"))
    half, bf16 = torch.float16, torch.bfloat16

    def large(sizes: Sizes, layers: int, blocks: int) -> Sizes:
        return replace(sizes, layers=layers, blocks=blocks)

    for case in (
        Case("score", blocks, lambda s, d: mean_k(half, WHOLE, large(s, 36, _FAR_BLOCKS), d),
             needed_bytes=12 * _GB),
        Case("rotated_scores", blocks,
             lambda s, d: rotated("NeoX", WHOLE, large(s, 12, 3 * _FAR_BLOCKS), d),
             needed_bytes=24 * _GB),
        Case("token_scores", blocks,
             lambda s, d: token("int8", WHOLE, large(s, 1, _FAR_BLOCKS), d),
             needed_bytes=12 * _GB),
        Case("rerope", f"{blocks}, the pool", lambda s, d: _far_pool(s, d), needed_bytes=14 * _GB),
        Case("mean_k", tokens, lambda s, d: _far_means(s, d), needed_bytes=20 * _GB),
        Case("quant", f"to int8 keys, {tokens}", lambda s, d: _far_codes(bf16, s, d),
             needed_bytes=14 * _GB),
    ):  # fmt: skip
        yield replace(case, only_on="cuda")


def _far_pool(sizes: Sizes, device: torch.device) -> Prepared:
    """The last rows of a pool are written, and its first."""
    row = (sizes.kv_heads, sizes.head_dim)
    pool_tokens = _FAR_BLOCKS * BLOCK_TOKENS
    pools = [
        torch.zeros((pool_tokens, *row), dtype=torch.bfloat16, device=device) for _ in range(2)
    ]
    x = random_normal((sizes.tokens, *row), device, torch.bfloat16)
    slots = torch.arange(sizes.tokens, device=device)
    slots[::2] = pool_tokens - 1 - slots[::2]
    at = torch.arange(sizes.tokens, device=device) % POSITIONS
    rotary = checked_tables(sizes.head_dim, device)["NeoX"]
    rotation = rotation_between(rotary, at, at.flip(0))

    def run(pool: torch.Tensor, implementation: Implementation) -> Tensors:
        scatter_rotated(pool, slots, x, rotation, implementation=implementation)
        return (pool,)

    return Prepared(
        kernel=lambda: run(pools[0], "triton"),
        reference=lambda: run(pools[1], "reference"),
        tolerance=within_rounding(torch.bfloat16),
        moved_bytes=2 * x.nbytes,
    )


def _heads_first(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """[blocks, tokens, heads, head_dim], a head's elements all before the next one's."""
    shape = (sizes.kv_heads, _FAR_BLOCKS, BLOCK_TOKENS, sizes.head_dim)
    return random_normal(shape, device, dtype).permute(1, 2, 0, 3)


def _last(sizes: Sizes) -> slice:
    """So many blocks at the end are compared: a reference of all would not fit in memory."""
    return slice(_FAR_BLOCKS - sizes.blocks, _FAR_BLOCKS)


def _far_means(sizes: Sizes, device: torch.device) -> Prepared:
    k, last = _heads_first(sizes, device, torch.bfloat16), _last(sizes)
    rotary = checked_tables(sizes.head_dim, device)["NeoX"]
    first = torch.arange(_FAR_BLOCKS, device=device) % (POSITIONS - BLOCK_TOKENS)
    everywhere = raw_rotation(first, BLOCK_TOKENS, rotary)
    at_end = raw_rotation(first[last], BLOCK_TOKENS, rotary)
    return Prepared(
        kernel=lambda: (mean_rotated(k, everywhere, implementation="triton")[last],),
        reference=lambda: (mean_rotated(k[last], at_end, implementation="reference"),),
        tolerance=within_rounding(torch.float32),
        moved_bytes=k.nbytes,
    )


def _far_codes(dtype: torch.dtype, sizes: Sizes, device: torch.device) -> Prepared:
    x, last = _heads_first(sizes, device, dtype), _last(sizes)

    def run(blocks: torch.Tensor, implementation: Implementation) -> Tensors:
        codes, scales = quantise(blocks, "int8", "keys", implementation=implementation)
        return codes[-sizes.blocks :], scales[-sizes.blocks :]

    return Prepared(
        kernel=lambda: run(x, "triton"),
        reference=lambda: run(x[last].contiguous(), "reference"),
        tolerance=codes_alike("int8", "keys", sizes.head_dim),
        moved_bytes=x.nbytes,
    )


