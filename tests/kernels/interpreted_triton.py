"""Triton kernels against their references, in Triton's interpreter on the CPU.

Not collected by name: test_triton.py runs this file in a process of its own, because
TRITON_INTERPRET counts only before triton is imported. A program costs the interpreter 5 to
11 ms, so launches stay small. Results start as NaN wherever the operation allocates them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvws.kernels.mean_k import mean_raw_k
from kvws.kernels.rerope import Rotation, rotate, rotation_between, scatter_rotated
from kvws.kernels.rotary import RotaryTable
from kvws.kernels.score import mean_k_scores

SEEDS = (0, 1)
PAYLOADS = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything torch.empty hands out is NaN, so that an unwritten result is seen."""
    empty = torch.empty

    def poisoned_empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        result = empty(*args, **kwargs)
        return result.fill_(math.nan) if result.is_floating_point() else result

    monkeypatch.setattr(torch, "empty", poisoned_empty)
    yield


def table(rotary_dim: int, *, interleaved: bool = False, factor: float = 1.0) -> RotaryTable:
    frequency = 10000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angle = torch.arange(256, dtype=torch.float64).unsqueeze(1) * frequency
    return RotaryTable(
        cos=(factor * angle.cos()).float(),
        sin=(factor * angle.sin()).float(),
        interleaved=interleaved,
    )


TABLES = {
    "neox": table(16),
    "interleaved": table(16, interleaved=True),
    "partial": table(12),
    "partial interleaved": table(12, interleaved=True),
    "attention factor": table(16, factor=1.37),
}


def assert_within(got: torch.Tensor, expected: torch.Tensor, seed: int) -> None:
    """fp32 to rounding; half precision to one unit in the last place."""
    ulp = 0.0 if got.dtype == torch.float32 else torch.finfo(got.dtype).eps
    budget = 2e-6 + ulp * expected.double().abs()
    error = (got.double() - expected.double()).abs()
    assert (error <= budget).all(), f"seed {seed}, off by {error.max()}"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("dtype", PAYLOADS, ids=str)
def test_rotate(name: str, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(37, 3, 16, generator=generator).to(dtype)
    source, target = torch.randint(0, 256, (2, 37), generator=generator)
    target[::4] = source[::4]
    rotation = rotation_between(TABLES[name], source, target)
    got = rotate(x, rotation, implementation="triton")
    assert_within(got, rotate(x, rotation, implementation="reference"), seed)
    assert torch.equal(got[::4], x[::4]), "tokens that stay keep their bits"


def test_control_a_wrong_sign_is_caught() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 16, generator=generator)
    good = rotation_between(TABLES["neox"], torch.arange(5), torch.arange(5) + 9)
    planted = Rotation(cos=good.cos, sin=-good.sin, interleaved=False, identity=False)
    with pytest.raises(AssertionError, match="off by"):
        assert_within(rotate(x, planted, implementation="triton"), rotate(x, good), 0)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("pool_dtype", PAYLOADS, ids=str)
def test_scatter_rotated(pool_dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(37, 6, 24, generator=generator)[:, ::2, 4:20]
    slots = torch.randperm(64, generator=generator)[:37]
    source, target = torch.randint(0, 256, (2, 37), generator=generator)
    rotation = rotation_between(TABLES["partial"], source, target)
    pools = [torch.full((64, 2, 3, 16), math.nan, dtype=pool_dtype) for _ in range(2)]
    scatter_rotated(pools[0][:, 1], slots, x, rotation, implementation="triton")
    scatter_rotated(pools[1][:, 1], slots, x, rotation, implementation="reference")
    assert torch.equal(pools[0].isnan(), pools[1].isnan()), "no other row is written"
    assert_within(pools[0][slots, 1], pools[1][slots, 1], seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("dtype", PAYLOADS, ids=str)
def test_mean_raw_k(name: str, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(3, 20, 4, 16, generator=generator).to(dtype)[:, :, ::2]
    first = torch.randint(0, 256 - 20, (3,), generator=generator)
    got = mean_raw_k(k, first, TABLES[name], implementation="triton")
    assert_within(got, mean_raw_k(k, first, TABLES[name], implementation="reference"), seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("tile_blocks", [75, 40])
@pytest.mark.parametrize("dtype", PAYLOADS, ids=str)
def test_mean_k_scores(dtype: torch.dtype, tile_blocks: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    queries = 3 * torch.randn(2, 12, 6, 24, generator=generator)[..., 2:22]
    index = torch.randn(2, 2, 75, 20, generator=generator).to(dtype)
    candidates = torch.rand(75, generator=generator) < 0.7
    index[:, :, ~candidates] = math.nan
    tiles, masks = index.split(tile_blocks, dim=2), candidates.split(tile_blocks)
    got = mean_k_scores(queries, tiles, masks, implementation="triton")
    expected = mean_k_scores(queries, tiles, masks, implementation="reference")
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, msg=f"seed {seed}")
    assert (got[~candidates] == 0).all()


def test_control_a_wrong_head_mapping_is_caught() -> None:
    generator = torch.Generator().manual_seed(0)
    queries = 3 * torch.randn(1, 3, 6, 16, generator=generator)
    tile = torch.randn(1, 2, 9, 16, generator=generator)
    every = torch.ones(9, dtype=torch.bool)
    planted = queries.unflatten(2, (3, 2)).transpose(2, 3).flatten(2, 3)
    got = mean_k_scores(planted, [tile], [every], implementation="triton")
    assert (got - mean_k_scores(queries, [tile], [every])).abs().max() > 1e-2


def test_tiles_without_candidates() -> None:
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(1, 3, 2, 16, generator=generator)
    tile = torch.randn(1, 1, 9, 16, generator=generator)
    none, every = torch.zeros(9, dtype=torch.bool), torch.ones(9, dtype=torch.bool)
    nothing = mean_k_scores(queries, [tile, tile], [none, none], implementation="triton")
    assert torch.equal(nothing, torch.zeros(18))
    tiles, masks = [tile, tile, tile[:, :, :0]], [none, every, none[:0]]
    got = mean_k_scores(queries, tiles, masks, implementation="triton")
    torch.testing.assert_close(got, mean_k_scores(queries, tiles, masks), rtol=1e-5, atol=1e-6)
