"""Triton's scores of the default signals against their references, in its interpreter on the CPU.

Not collected by name: test_triton.py runs this file in a process of its own, because
TRITON_INTERPRET counts only before triton is imported. A program costs the interpreter 5 to
11 ms, so launches stay small. Blocks that are no candidates lie in the middle, and hold NaN or
scales of NaN: one that is read shows.
"""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from kvws.kernels.rotary import RotaryTable
from kvws.kernels.rotated_scores import rotated_scores
from kvws.kernels.token_scores import TokenFormat, largest_logits, token_scores
from tests.kernels.interpreted_offsets import apart

FORMATS: tuple[TokenFormat, ...] = get_args(TokenFormat)
GROUPS = (1, 3, 4)
HEAD_DIMS = (64, 80, 128)

every_format = pytest.mark.parametrize("format", FORMATS)
every_group = pytest.mark.parametrize("group", GROUPS)
every_head_dim = pytest.mark.parametrize("head_dim", HEAD_DIMS)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def with_holes(blocks: int) -> torch.Tensor:
    candidates = torch.ones(blocks, dtype=torch.bool)
    candidates[[0, blocks // 2, blocks // 2 + 1]] = False
    return candidates


# ---- token keys ------------------------------------------------------------------------------


def stored(
    format: TokenFormat, kv_heads: int, candidates: torch.Tensor, head_dim: int
) -> tuple[torch.Tensor, ...]:
    """Parts of all KV heads, [kv_heads, blocks, …]; poisoned where not a candidate."""
    generator, blocks = seeded(), len(candidates)
    if format == "means":
        parts = (torch.randn(kv_heads, blocks, 1, head_dim, generator=generator).half(),)
    else:
        scales = torch.rand(kv_heads, blocks, 32, generator=generator).half()
        low, high, width, dtype = -127, 128, head_dim, torch.int8
        if format == "int4":
            low, high, width, dtype = 0, 256, head_dim // 2, torch.uint8
        shape = (kv_heads, blocks, 32, width)
        parts = (scales, torch.randint(low, high, shape, generator=generator, dtype=dtype))
    parts[0][:, ~candidates] = math.nan
    return parts


@every_head_dim
@every_format
def test_largest_logits(format: TokenFormat, head_dim: int) -> None:
    candidates = with_holes(9)
    parts = tuple(part[0] for part in stored(format, 1, candidates, head_dim))
    rows = torch.randn(19, 2 * head_dim, generator=seeded())[:, ::2]
    tiles = list(zip(*(part.split(6) for part in parts), strict=True))
    got = largest_logits(rows, tiles, candidates.split(6), implementation="triton")
    expected = largest_logits(rows, tiles, candidates.split(6), implementation="reference")
    assert got.shape == (6, 19)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-3)


@every_group
@every_format
def test_token_scores(format: TokenFormat, group: int) -> None:
    candidates = with_holes(7)
    tile = stored(format, 2, candidates, 64)
    queries = list(torch.randn(2, 5, group, 64, generator=seeded()))
    got = token_scores(queries, [tile], [candidates], implementation="triton")
    expected = token_scores(queries, [tile], [candidates], implementation="reference")
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert not got[~candidates].any() and bool(got[candidates].isfinite().all())


def test_means_of_more_blocks_than_a_program_serves() -> None:
    candidates = with_holes(150)
    (means,) = stored("means", 1, candidates, 64)
    rows = torch.randn(3, 64, generator=seeded())
    got = largest_logits(rows, [(means[0],)], [candidates], implementation="triton")
    torch.testing.assert_close(
        got, means[0, candidates, 0].float() @ rows.t(), rtol=1e-5, atol=1e-4
    )


def test_control_halves_of_int4_the_wrong_way_round_are_caught() -> None:
    every = torch.ones(4, dtype=torch.bool)
    scales, codes = (part[0] for part in stored("int4", 1, every, 64))
    swapped = (codes << 4) | (codes >> 4)
    rows = torch.randn(3, 64, generator=seeded())
    got = largest_logits(rows, [(scales, swapped)], [every], implementation="triton")
    expected = largest_logits(rows, [(scales, codes)], [every], implementation="reference")
    assert (got - expected).abs().max() > 1


@pytest.mark.parametrize("axis", range(3))
def test_token_keys_may_lie_far_apart(axis: int) -> None:
    scales, codes = (part[0] for part in stored("int8", 1, torch.ones(3) > 0, 16))
    rows = torch.randn(3, 16, generator=seeded())
    everywhere = [torch.ones(3, dtype=torch.bool)]
    got = largest_logits(rows, [(scales, apart(codes, axis))], everywhere, implementation="triton")
    expected = largest_logits(rows, [(scales, codes)], everywhere, implementation="reference")
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-3)


# ---- rotated means ---------------------------------------------------------------------------


def table(rotary_dim: int, *, interleaved: bool = False, factor: float = 1.0) -> RotaryTable:
    frequency = 10000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angle = torch.arange(256, dtype=torch.float64).unsqueeze(1) * frequency
    return RotaryTable(
        cos=(factor * angle.cos()).float(),
        sin=(factor * angle.sin()).float(),
        interleaved=interleaved,
    )


def agree(
    tables: list[RotaryTable], *, group: int, head_dim: int, dtype: torch.dtype = torch.float16
) -> None:
    generator, layers, tokens, kv_heads, blocks = seeded(), len(tables), 5, 2, 37
    pairs = tables[0].rotary_dim // 2
    candidates = with_holes(blocks)
    means = torch.randn(layers, kv_heads, blocks, head_dim, generator=generator).to(dtype)
    variances = torch.rand(layers, kv_heads, blocks, pairs, generator=generator).to(dtype)
    means[:, :, ~candidates] = variances[:, :, ~candidates] = math.nan
    distances = torch.randint(32, 256, (blocks,), generator=generator)
    distances[~candidates] = -1
    queries = 3 * torch.randn(layers, tokens, kv_heads * group, head_dim, generator=generator)
    tiles = list(zip(means.split(20, 2), variances.split(20, 2), strict=True))
    given = (
        queries,
        torch.arange(7, 7 + tokens),
        tiles,
        candidates.split(20),
        distances.split(20),
        tables,
    )
    got = rotated_scores(*given, implementation="triton")
    expected = rotated_scores(*given, implementation="reference")
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert not got[~candidates].any()
    assert float(got.sum()) == pytest.approx(layers * tokens * kv_heads * group, rel=1e-4)


@every_group
def test_rotated_scores_of_a_group(group: int) -> None:
    agree([table(64)], group=group, head_dim=64)


@every_head_dim
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotated_scores_of_a_head_size(interleaved: bool, head_dim: int) -> None:
    agree([table(head_dim, interleaved=interleaved)], group=3, head_dim=head_dim)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotated_scores_where_dimensions_pass_through(interleaved: bool) -> None:
    agree([table(48, interleaved=interleaved)], group=1, head_dim=80)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotated_scores_of_a_dtype(dtype: torch.dtype) -> None:
    agree([table(64, factor=1.37)], group=1, head_dim=64, dtype=dtype)


def test_layers_may_rotate_differently() -> None:
    one, other = table(64), table(64, interleaved=True)
    agree([one, other, one], group=1, head_dim=64)


@pytest.mark.parametrize("axis", range(4))
def test_rotated_means_may_lie_far_apart(axis: int) -> None:
    generator = seeded()
    means, variances = (
        torch.rand(3, 3, 3, width, generator=generator).half() for width in (16, 8)
    )
    queries = torch.randn(3, 2, 3, 16, generator=generator)
    every, far = torch.ones(3, dtype=torch.bool), torch.tensor([200, 40, 32])
    rest = ([every], [far], [table(16)] * 3)
    tile = (apart(means, axis), apart(variances, axis))
    got = rotated_scores(queries, torch.arange(2), [tile], *rest, implementation="triton")
    expected = rotated_scores(queries, torch.arange(2), [(means, variances)], *rest)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_control_a_wrong_pairing_is_caught() -> None:
    generator = seeded()
    means, variances = torch.randn(2, 1, 1, 4, 64, generator=generator).half().chunk(2)
    tile = (means[0], variances[0, ..., :32].abs())
    queries = 3 * torch.randn(1, 2, 1, 64, generator=generator)
    every, far = torch.ones(4, dtype=torch.bool), torch.tensor([200, 40, 90, 32])
    given = (queries, torch.arange(2), [tile], [every], [far])
    got = rotated_scores(*given, [table(64, interleaved=True)], implementation="triton")
    expected = rotated_scores(*given, [table(64)], implementation="reference")
    assert (got - expected).abs().max() > 1e-2


def test_tiles_without_candidates() -> None:
    generator = seeded()
    tile = tuple(torch.randn(1, 1, 9, d, generator=generator).half() for d in (64, 32))
    none, every = torch.zeros(9, dtype=torch.bool), torch.ones(9, dtype=torch.bool)
    queries, far = torch.randn(1, 3, 2, 64, generator=generator), torch.full((9,), 40)
    given = (queries, torch.arange(3), [tile, tile], [none, every], [far, far], [table(64)])
    got = rotated_scores(*given, implementation="triton")
    torch.testing.assert_close(got, rotated_scores(*given), rtol=1e-4, atol=1e-5)
    given = (*given[:3], [none, none], *given[4:])
    assert torch.equal(rotated_scores(*given, implementation="triton"), torch.zeros(18))
