"""Cases of the kernels that score blocks: Mean-K, rotated means, and token keys."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from kvws.bench.gpu.case import (
    BLOCK_TOKENS,
    CHECKED,
    Case,
    Prepared,
    Sizes,
    Tensors,
    Tolerance,
    close,
    random_normal,
    within,
)
from kvws.bench.gpu.rotary_tables import POSITIONS, checked_tables
from kvws.kernels.dispatch import Implementation
from kvws.kernels.rotated_scores import rotated_scores
from kvws.kernels.score import mean_k_scores
from kvws.kernels.token_scores import token_scores
from kvws.kernels.token_scores.formats import PART_DTYPES, TokenFormat, part_shapes

_TIMED = replace(CHECKED, layers=12, blocks=32_768, query_tokens=64)
"""For scores of means; keys of tokens are timed in the content heads of two layers."""

_TILE_BLOCKS = 512
"""Of a tile where the index is cut at all, as that in host memory is; small ones have three tiles.
Each costs a launch."""


@dataclass(frozen=True)
class _Shape:
    """What is cut and left out.

    Attributes:
        cut: into several tiles.
        candidates: share of the blocks that compete.
        group: query heads to a KV head; None as the sizes say.
    """

    cut: bool = False
    candidates: float = 1.0
    group: int | None = None
    head_dim: int | None = None

    def of(self, sizes: Sizes) -> Sizes:
        heads = sizes.kv_heads * self.group if self.group else sizes.query_heads
        return replace(sizes, query_heads=heads, head_dim=self.head_dim or sizes.head_dim)

    def tile_blocks(self, blocks: int) -> int:
        return min(_TILE_BLOCKS, -(-blocks // 3)) if self.cut else blocks

    def masks(self, blocks: int, device: torch.device) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(4)
        chosen = torch.rand(blocks, generator=generator) <= self.candidates
        return list(torch.split(chosen.to(device), self.tile_blocks(blocks)))

    def tiles(self, part: torch.Tensor, axis: int) -> list[torch.Tensor]:
        """Contiguous each, as an index that grows tile by tile has them."""
        tiles = torch.split(part, self.tile_blocks(part.shape[axis]), dim=axis)
        return [tile.contiguous() for tile in tiles]


WHOLE = _Shape()
_SHAPES = {
    "": WHOLE,
    ", some of the blocks": _Shape(candidates=0.6),
    ", tiles of 512": _Shape(cut=True),
    ", groups of 1": _Shape(group=1, candidates=0.9),
    ", groups of 3, heads of 80": _Shape(group=3, head_dim=80, candidates=0.9),
}
_TIMED_SHAPES = ("", ", tiles of 512")


def score_cases() -> Iterator[Case]:
    """Tolerances tell fp32 from TF32, whose products are five times as far off."""
    for name, shape in _SHAPES.items():
        timed = _TIMED if name in _TIMED_SHAPES else None
        yield _mean_k_case(f"float16{name}", torch.float16, shape, timed)
        yield _rotated_case(f"NeoX, float16{name}", "NeoX", shape, timed)
        of_heads = timed and replace(timed, layers=2)
        yield _token_case(f"int8{name}", "int8", shape, of_heads)
    for dtype in (torch.bfloat16, torch.float32):
        yield _mean_k_case(str(dtype).removeprefix("torch."), dtype, WHOLE)
    for table in ("interleaved", "partial", "YaRN"):
        yield _rotated_case(f"{table}, float16", table, WHOLE)
    yield _token_case("int4", "int4", WHOLE, replace(_TIMED, layers=2))
    yield _token_case("means", "means", WHOLE, replace(_TIMED, layers=2))


def _mean_k_case(
    variant: str, dtype: torch.dtype, shape: _Shape, timed: Sizes | None = None
) -> Case:
    return Case("score", variant, lambda s, d: mean_k(dtype, shape, shape.of(s), d), timed)


def _rotated_case(
    variant: str, table: str, shape: _Shape, timed: Sizes | None = None
) -> Case:
    return Case(
        "rotated_scores", variant, lambda s, d: rotated(table, shape, shape.of(s), d), timed
    )


def _token_case(
    variant: str, format: TokenFormat, shape: _Shape, timed: Sizes | None = None
) -> Case:
    return Case(
        "token_scores", variant, lambda s, d: token(format, shape, shape.of(s), d), timed
    )


def _queries(sizes: Sizes, device: torch.device) -> torch.Tensor:
    """Large enough for some blocks to stand out."""
    shape = (sizes.layers, sizes.query_tokens, sizes.query_heads, sizes.head_dim)
    return 2 * random_normal(shape, device, torch.float32, seed=5)


def mean_k(dtype: torch.dtype, shape: _Shape, sizes: Sizes, device: torch.device) -> Prepared:
    queries = _queries(sizes, device)
    index_shape = (sizes.layers, sizes.kv_heads, sizes.blocks, sizes.head_dim)
    index = random_normal(index_shape, device, dtype)
    masks = shape.masks(sizes.blocks, device)
    _spoil(index, 2, masks)
    tiles = shape.tiles(index, 2)

    def run(implementation: Implementation) -> Tensors:
        return (mean_k_scores(queries, tiles, masks, implementation=implementation),)

    return Prepared(
        kernel=lambda: run("triton"),
        reference=lambda: run("reference"),
        tolerance=_of_candidates(close(5e-5, 1e-6), masks),
        moved_bytes=index.nbytes + queries.nbytes + 4 * sizes.blocks,
        multiplications=2 * queries.numel() * sizes.blocks,
    )


def rotated(table: str, shape: _Shape, sizes: Sizes, device: torch.device) -> Prepared:
    queries = _queries(sizes, device)
    rotary = checked_tables(sizes.head_dim, device)[table]
    before = (sizes.layers, sizes.kv_heads, sizes.blocks)
    means = random_normal((*before, sizes.head_dim), device, torch.float16)
    variances = random_normal((*before, rotary.rotary_dim // 2), device, torch.float16, seed=1)
    variances.abs_()
    masks = shape.masks(sizes.blocks, device)
    for part in (means, variances):
        _spoil(part, 2, masks)
    tiles = list(zip(shape.tiles(means, 2), shape.tiles(variances, 2), strict=True))
    away = (torch.arange(sizes.blocks, device=device).flip(0) + 1) * BLOCK_TOKENS
    distances = list(torch.split(away.clamp(max=POSITIONS - 1), masks[0].numel()))
    offsets = torch.arange(sizes.query_tokens, device=device)

    def run(implementation: Implementation) -> Tensors:
        tables = [rotary] * sizes.layers
        scores = rotated_scores(
            queries, offsets, tiles, masks, distances, tables, implementation=implementation
        )
        return (scores,)

    of_row = (sizes.head_dim + rotary.rotary_dim // 2) / sizes.head_dim
    return Prepared(
        kernel=lambda: run("triton"),
        reference=lambda: run("reference"),
        tolerance=_of_candidates(close(5e-5, 1e-6), masks),
        moved_bytes=means.nbytes + variances.nbytes + queries.nbytes + 12 * sizes.blocks,
        multiplications=int(2 * queries.numel() * of_row) * sizes.blocks,
    )


def token(format: TokenFormat, shape: _Shape, sizes: Sizes, device: torch.device) -> Prepared:
    """A content head is one KV head of a layer and one query head that reads it, or the group."""
    heads = sizes.layers * sizes.kv_heads
    group = shape.group or 1
    queries = [
        random_normal((sizes.query_tokens, group, sizes.head_dim), device, torch.float32, seed=n)
        for n in range(heads)
    ]
    tokens = 1 if format == "means" else BLOCK_TOKENS
    masks = shape.masks(sizes.blocks, device)
    parts = [
        _token_part((heads, sizes.blocks, *of_block), dtype, device)
        for of_block, dtype in zip(
            part_shapes(format, tokens, sizes.head_dim), PART_DTYPES[format], strict=True
        )
    ]
    for part in parts:
        if part.is_floating_point():
            _spoil(part, 1, masks)
    tiles = list(zip(*(shape.tiles(part, 1) for part in parts), strict=True))

    def run(implementation: Implementation) -> Tensors:
        return (token_scores(queries, tiles, masks, implementation=implementation),)

    rows = heads * group * sizes.query_tokens
    return Prepared(
        kernel=lambda: run("triton"),
        reference=lambda: run("reference"),
        tolerance=_of_candidates(within(1e-4 * heads * group), masks),
        moved_bytes=sum(part.nbytes for part in parts) + 4 * sizes.blocks,
        multiplications=rows * sizes.blocks * tokens * sizes.head_dim,
    )


def _token_part(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    if dtype == torch.float16:
        return random_normal(shape, device, dtype, seed=6).abs_().mul_(0.02)
    least, most = (-127, 128) if dtype == torch.int8 else (0, 256)
    generator = torch.Generator(device).manual_seed(7)
    return torch.randint(least, most, shape, generator=generator, device=device, dtype=dtype)


def _spoil(part: torch.Tensor, axis: int, masks: list[torch.Tensor]) -> None:
    """What is no candidate is never to be read. Mutates: `part`."""
    left_out = (~torch.cat(masks)).nonzero().flatten()
    if left_out.numel():
        part.index_fill_(axis, left_out, math.nan)


def _of_candidates(tolerance: Tolerance, masks: list[torch.Tensor]) -> Tolerance:
    """The same, and exactly 0 for what is no candidate."""

    def share(got: Tensors, expected: Tensors) -> float:
        (scores,) = got
        untouched = bool((scores[~torch.cat(masks)] == 0).all())
        return tolerance.share(got, expected) if untouched else math.inf

    return Tolerance(tolerance.text, share)
