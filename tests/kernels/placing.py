"""Blocks to place, where they belong by fp64 arithmetic, and a process without a library yet."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvws.kernels.place import api, build, native, place_blocks
from kvws.kernels.rotary import RotaryTable, Rotation, rotation_between

TOKENS = 32
POISON = 12345.0
PAYLOADS = (torch.float32, torch.float16, torch.bfloat16)
SEEDS = (0, 1)
# The rotation has been rounded to fp32 already: two products and a sum, relative to |a| + |b|.
FP32_TOLERANCE = 2**-23

needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="no C compiler")


def forget() -> None:
    """As in a process that has placed nothing yet."""
    native._outcome.cache_clear()
    api._logged_choice.cache_clear()


class Case:
    """Random blocks in a slab with gaps between them, and a poisoned pool."""

    def __init__(
        self,
        seed: int,
        dtype: torch.dtype,
        *,
        interleaved: bool = False,
        heads: int | None = None,
        head_dim: int | None = None,
        rotary_dim: int | None = None,
    ) -> None:
        rng, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        heads = heads or rng.randint(1, 4)
        head_dim = head_dim or 2 * rng.randint(1, 40)
        self.rotary_dim = rotary_dim or 2 * rng.randint(1, head_dim // 2)
        held, pool_pages = rng.randint(3, 9), rng.randint(4, 9)
        count = rng.randint(1, min(held, pool_pages) - 1)
        block = TOKENS * heads * head_dim
        gap = rng.randint(0, 3) * block
        slab = torch.randn(held, block + gap, generator=self.generator).to(dtype)
        self.source = slab[:, gap:].unflatten(1, (TOKENS, heads, head_dim))
        self.pool = torch.full((pool_pages * TOKENS, heads, head_dim), POISON, dtype=dtype)
        self.pages = torch.randperm(pool_pages, generator=self.generator)[:count]
        self.blocks = torch.randint(0, held, (count,), generator=self.generator)
        frequency = 1e3 ** -(torch.arange(0, self.rotary_dim, 2) / self.rotary_dim)
        angle = torch.arange(4096)[:, None] * frequency
        self.table = RotaryTable(angle.cos(), angle.sin(), interleaved)
        self.baked = self._positions(count)
        self.targets = self._positions(count)
        self.rotation = rotation_between(self.table, self.baked, self.targets)

    def _positions(self, count: int) -> torch.Tensor:
        first = torch.randint(0, 4096 - TOKENS, (count, 1), generator=self.generator)
        return (first + torch.arange(TOKENS)).flatten()

    def place(self, implementation: Any, rotation: Rotation | None) -> torch.Tensor:
        """[pages, tokens, heads, head_dim]: the pool after the call."""
        pool = self.pool.clone()
        place_blocks(
            pool, self.pages, self.source, self.blocks, rotation, implementation=implementation
        )
        return pool.unflatten(0, (-1, TOKENS))

    def oracle(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Placed blocks in fp64, and the sum of magnitudes behind each number."""
        x = self.source[self.blocks].double()
        half = self.rotary_dim // 2
        first, second = (
            (slice(0, self.rotary_dim, 2), slice(1, self.rotary_dim, 2))
            if self.table.interleaved
            else (slice(0, half), slice(half, 2 * half))
        )
        turn = torch.complex(self.rotation.cos.double(), self.rotation.sin.double())
        turned = torch.complex(x[..., first], x[..., second]) * turn.view(-1, TOKENS, 1, half)
        expected, scale = x.clone(), x.abs()
        expected[..., first], expected[..., second] = turned.real, turned.imag
        scale[..., first] = scale[..., second] = x[..., first].abs() + x[..., second].abs()
        return expected, scale


def assert_close(got: torch.Tensor, case: Case, note: str) -> None:
    expected, scale = case.oracle()
    half_ulp = 0.0 if got.dtype == torch.float32 else torch.finfo(got.dtype).eps / 2
    smallest = torch.finfo(got.dtype).smallest_normal * half_ulp  # of the subnormal numbers
    budget = half_ulp * expected.abs() + FP32_TOLERANCE * scale * (1 + half_ulp) + smallest
    worst = float(((got.double() - expected).abs() - budget).max())
    assert worst <= 0, f"{note}: {worst} over the budget"


def each_case(dtype: torch.dtype, interleaved: bool) -> Iterator[tuple[str, Case]]:
    for seed in SEEDS:
        yield f"seed {seed}", Case(seed, dtype, interleaved=interleaved)
        whole = {"heads": 3, "head_dim": 64, "rotary_dim": 64}
        yield f"SmolLM2, seed {seed}", Case(seed, dtype, interleaved=interleaved, **whole)


def assert_every_half_is_right(dtype: torch.dtype, interleaved: bool) -> None:
    """Products of all 2¹⁶ numbers: ties, subnormal numbers and overflow are all met."""
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    source = numbers.view(-1, TOKENS, 1, 16)
    tokens, order = source.shape[0] * TOKENS, torch.arange(source.shape[0])
    for factor in (1 - 2.0**-9, 1.5, 2.0**-10):
        cos, sin = torch.full((tokens, 8), factor), torch.zeros(tokens, 8)
        rotation = Rotation(cos, sin, interleaved, identity=False)
        pool = torch.full((tokens, 1, 16), POISON, dtype=dtype)
        place_blocks(pool, order, source, order, rotation, implementation="native")
        got, expected = pool.flatten(), (numbers.float() * factor).to(dtype)
        # Infinity times a sine of 0 is not a number, and makes its mate none.
        mates = rotation_mates(source, interleaved).flatten()
        number = numbers.isfinite() & mates.isfinite()
        assert torch.equal(got[number], expected[number])
        assert got[numbers.isnan()].isnan().all()
        assert expected[number].isinf().any() == (factor == 1.5)


def rotation_mates(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The other member of each number's pair, where all of the head is rotary."""
    if interleaved:
        return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return x.roll(x.shape[-1] // 2, -1)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)
