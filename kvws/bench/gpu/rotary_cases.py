"""Cases of the kernels that rotate keys: into a pool, into a tensor, and into a block's mean."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from kvws.bench.gpu.case import (
    BLOCK_TOKENS,
    CHECKED,
    Case,
    Prepared,
    Sizes,
    random_normal,
    within_rounding,
)
from kvws.bench.gpu.rotary_tables import POSITIONS, TABLE_NAMES, checked_tables
from kvws.kernels.dispatch import Implementation
from kvws.kernels.mean_k import mean_rotated, raw_rotation
from kvws.kernels.rerope import Rotation, rotate, rotation_between, scatter_rotated

_TIMED = replace(CHECKED, blocks=2048)
_ODD_HEAD_DIM = 80


def rotary_cases() -> Iterator[Case]:
    for table in TABLE_NAMES:
        timed = _TIMED if table in ("NeoX", "interleaved", "partial") else None
        yield _scatter_case(table, torch.bfloat16, timed)
        yield _mean_case(table, torch.bfloat16, timed)
    for dtype in (torch.float16, torch.float32):
        yield _scatter_case("NeoX", dtype)
        yield _mean_case("NeoX", dtype)
    for table in ("NeoX", "partial interleaved"):
        yield _scatter_case(table, torch.bfloat16, head_dim=_ODD_HEAD_DIM)
        yield _mean_case(table, torch.bfloat16, head_dim=_ODD_HEAD_DIM)
    yield Case("rerope", "into a tensor, fp32 to bf16", _rotate)


def _variant(table: str, dtype: torch.dtype, head_dim: int | None) -> str:
    size = "" if head_dim is None else f", head of {head_dim}"
    return f"{table}, {str(dtype).removeprefix('torch.')}{size}"


def _scatter_case(
    table: str, dtype: torch.dtype, timed: Sizes | None = None, head_dim: int | None = None
) -> Case:
    def prepare(sizes: Sizes, device: torch.device) -> Prepared:
        sized = replace(sizes, head_dim=head_dim or sizes.head_dim)
        return _scatter(table, dtype, sized, device)

    return Case("rerope", f"into a pool, {_variant(table, dtype, head_dim)}", prepare, timed)


def _mean_case(
    table: str, dtype: torch.dtype, timed: Sizes | None = None, head_dim: int | None = None
) -> Case:
    def prepare(sizes: Sizes, device: torch.device) -> Prepared:
        sized = replace(sizes, head_dim=head_dim or sizes.head_dim)
        return _mean(table, dtype, sized, device)

    return Case("mean_k", _variant(table, dtype, head_dim), prepare, timed)


def _scatter(table: str, dtype: torch.dtype, sizes: Sizes, device: torch.device) -> Prepared:
    """Distinct rows of a pool twice as large; the others must keep their bits."""
    x = random_normal((sizes.tokens, sizes.kv_heads, sizes.head_dim), device, dtype)
    rotation = _moves(table, sizes, device)
    generator = torch.Generator().manual_seed(3)
    slots = torch.randperm(2 * sizes.tokens, generator=generator)[: sizes.tokens].to(device)
    rows = random_normal((2 * sizes.tokens, *x.shape[1:]), device, dtype, seed=1)
    pools = (rows, rows.clone())

    def scatter(pool: torch.Tensor, implementation: Implementation) -> tuple[torch.Tensor]:
        scatter_rotated(pool, slots, x, rotation, implementation=implementation)
        return (pool,)

    return Prepared(
        kernel=lambda: scatter(pools[0], "triton"),
        reference=lambda: scatter(pools[1], "reference"),
        tolerance=within_rounding(dtype),
        moved_bytes=2 * x.nbytes + slots.nbytes + rotation.cos.nbytes + rotation.sin.nbytes,
    )


def _rotate(sizes: Sizes, device: torch.device) -> Prepared:
    x = random_normal((sizes.tokens, sizes.kv_heads, sizes.head_dim), device, torch.float32)
    rotation = _moves("NeoX", sizes, device)
    out_dtype = torch.bfloat16
    return Prepared(
        kernel=lambda: (rotate(x, rotation, out_dtype=out_dtype, implementation="triton"),),
        reference=lambda: (rotate(x, rotation, out_dtype=out_dtype, implementation="reference"),),
        tolerance=within_rounding(out_dtype),
        moved_bytes=x.nbytes * 3 // 2 + rotation.cos.nbytes + rotation.sin.nbytes,
    )


def _moves(table: str, sizes: Sizes, device: torch.device) -> Rotation:
    """From anywhere to anywhere; every eighth token stays."""
    generator = torch.Generator().manual_seed(2)
    source, target = torch.randint(0, POSITIONS, (2, sizes.tokens), generator=generator)
    target[::8] = source[::8]
    rotary = checked_tables(sizes.head_dim, device)[table]
    return rotation_between(rotary, source.to(device), target.to(device))


def _mean(table: str, dtype: torch.dtype, sizes: Sizes, device: torch.device) -> Prepared:
    k = random_normal((sizes.blocks, BLOCK_TOKENS, sizes.kv_heads, sizes.head_dim), device, dtype)
    generator = torch.Generator().manual_seed(2)
    first = torch.randint(0, POSITIONS - BLOCK_TOKENS, (sizes.blocks,), generator=generator)
    rotary = checked_tables(sizes.head_dim, device)[table]
    rotation = raw_rotation(first.to(device), BLOCK_TOKENS, rotary)
    means_bytes = 4 * sizes.blocks * sizes.kv_heads * sizes.head_dim
    return Prepared(
        kernel=lambda: (mean_rotated(k, rotation, implementation="triton"),),
        reference=lambda: (mean_rotated(k, rotation, implementation="reference"),),
        tolerance=within_rounding(torch.float32),
        moved_bytes=k.nbytes + means_bytes + rotation.cos.nbytes + rotation.sin.nbytes,
    )
