"""What moving keys means, against complex numbers in fp64 and plain loops."""

from __future__ import annotations

import math

import pytest
import torch

from kvws.errors import ConfigError
from kvws.kernels.rerope import Rotation, rotate, rotation_between, scatter_rotated
from kvws.kernels.rotary import RotaryTable

SEEDS = (0, 1, 2)
MAX_POSITION = 512
HEADS = 3
PAYLOADS = (torch.float32, torch.float16, torch.bfloat16)
# fp32 budget: cos and sin carry a few roundings each, and so does the two-term sum.
FP32_TOLERANCE = 2e-6


def table(
    rotary_dim: int, *, interleaved: bool = False, factor: float = 1.0, through_bf16: bool = False
) -> RotaryTable:
    frequency = 10000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angle = torch.arange(MAX_POSITION, dtype=torch.float64).unsqueeze(1) * frequency
    cos, sin = (factor * angle.cos()).float(), (factor * angle.sin()).float()
    if through_bf16:
        cos, sin = cos.bfloat16().float(), sin.bfloat16().float()
    return RotaryTable(cos=cos, sin=sin, interleaved=interleaved)


def positions(n: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, MAX_POSITION, (n,), generator=generator)


def oracle(
    x: torch.Tensor,
    rotary: RotaryTable,
    source: torch.Tensor | None,
    target: torch.Tensor | None,
    *,
    direction: int = 1,
) -> torch.Tensor:
    """Each pair is a complex number, multiplied by z(target) / z(source)."""
    result = x.double().clone()
    half = rotary.rotary_dim // 2
    for token in range(x.shape[0]):
        for pair in range(half):

            def z(at: torch.Tensor | None, token: int = token, pair: int = pair) -> complex:
                if at is None:
                    return 1 + 0j
                row = int(at[token])
                return complex(float(rotary.cos[row, pair]), float(rotary.sin[row, pair]))

            factor = z(target) / z(source)
            if direction < 0:
                factor = factor.conjugate()
            a, b = (2 * pair, 2 * pair + 1) if rotary.interleaved else (pair, pair + half)
            for head in range(x.shape[1]):
                moved = complex(float(x[token, head, a]), float(x[token, head, b])) * factor
                result[token, head, a], result[token, head, b] = moved.real, moved.imag
    return result


def worst(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest deviation, relative to the largest value."""
    return float((got.double() - expected).abs().max() / expected.abs().max())


TABLES = {
    "neox": table(16),
    "interleaved": table(16, interleaved=True),
    "partial": table(8),
    "partial interleaved": table(8, interleaved=True),
    "attention factor": table(16, factor=1.37),
    "through bf16": table(16, through_bf16=True),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("ends", ["both", "from raw", "to raw"])
def test_a_rotation_is_a_complex_product(name: str, ends: str, seed: int) -> None:
    rotary, generator = TABLES[name], torch.Generator().manual_seed(seed)
    x = torch.randn(7, HEADS, 16, generator=generator)
    source = None if ends == "from raw" else positions(7, generator)
    target = None if ends == "to raw" else positions(7, generator)

    got = rotate(x, rotation_between(rotary, source, target))

    assert worst(got, oracle(x, rotary, source, target)) < FP32_TOLERANCE, f"seed {seed}"


@pytest.mark.parametrize("seed", SEEDS)
def test_control_the_oracle_catches_a_rotation_the_wrong_way(seed: int) -> None:
    rotary, generator = TABLES["neox"], torch.Generator().manual_seed(seed)
    x = torch.randn(7, HEADS, 16, generator=generator)
    source, target = positions(7, generator), positions(7, generator)
    good = rotation_between(rotary, source, target)
    planted = Rotation(cos=good.cos, sin=-good.sin, interleaved=False, identity=False)

    expected = oracle(x, rotary, source, target)

    assert worst(rotate(x, planted), expected) > 0.1, f"seed {seed}"
    assert worst(rotate(x, good), oracle(x, rotary, source, target, direction=-1)) > 0.1


def test_control_the_oracle_catches_the_wrong_pairing() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, HEADS, 16, generator=generator)
    source, target = positions(7, generator), positions(7, generator)
    got = rotate(x, rotation_between(TABLES["neox"], source, target))
    assert worst(got, oracle(x, TABLES["interleaved"], source, target)) > 0.1


@pytest.mark.parametrize("dtype", PAYLOADS, ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_half_precision_payloads_are_rounded_once(dtype: torch.dtype, seed: int) -> None:
    rotary, generator = TABLES["partial"], torch.Generator().manual_seed(seed)
    x = torch.randn(7, HEADS, 16, generator=generator).to(dtype)
    source, target = positions(7, generator), positions(7, generator)
    rotation = rotation_between(rotary, source, target)
    expected = oracle(x, rotary, source, target)

    got = rotate(x, rotation)

    assert got.dtype == dtype
    assert torch.equal(got, rotate(x, rotation, out_dtype=torch.float32).to(dtype))
    half_ulp = torch.finfo(dtype).eps / 2
    budget = half_ulp * expected.abs() + FP32_TOLERANCE * expected.abs().max()
    assert ((got.double() - expected).abs() <= budget).all(), f"seed {seed}"
    assert torch.equal(got[..., 8:], x[..., 8:]), "what is not rotary passes through"


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("seed", SEEDS)
def test_there_and_back_again(name: str, seed: int) -> None:
    rotary, generator = TABLES[name], torch.Generator().manual_seed(seed)
    x = torch.randn(9, HEADS, 16, generator=generator)
    here, there = positions(9, generator), positions(9, generator)
    moved = rotate(x, rotation_between(rotary, here, there))
    back = rotate(moved, rotation_between(rotary, there, here))
    assert worst(back, x.double()) < FP32_TOLERANCE, f"seed {seed}"


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("seed", SEEDS)
def test_two_moves_are_one_move(name: str, seed: int) -> None:
    rotary, generator = TABLES[name], torch.Generator().manual_seed(seed)
    x = torch.randn(9, HEADS, 16, generator=generator)
    a, b, c = (positions(9, generator) for _ in range(3))
    by_b = rotate(rotate(x, rotation_between(rotary, a, b)), rotation_between(rotary, b, c))
    by_raw = rotate(
        rotate(x, rotation_between(rotary, a, None)), rotation_between(rotary, None, c)
    )
    straight = rotate(x, rotation_between(rotary, a, c)).double()
    assert worst(by_b, straight) < FP32_TOLERANCE, f"seed {seed}"
    assert worst(by_raw, straight) < FP32_TOLERANCE, f"seed {seed}"


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", PAYLOADS, ids=str)
@pytest.mark.parametrize("name", TABLES)
def test_tokens_that_stay_keep_their_bits(name: str, dtype: torch.dtype) -> None:
    rotary, generator = TABLES[name], torch.Generator().manual_seed(0)
    x = torch.randn(8, HEADS, 16, generator=generator).to(dtype)
    x[0, 0, :4] = torch.tensor([-0.0, math.inf, -math.inf, math.nan])
    source = positions(8, generator)
    target = source.clone()
    target[4:] = (target[4:] + 1) % MAX_POSITION

    all_stay = rotation_between(rotary, source, source)
    half_stay = rotation_between(rotary, source, target)

    assert all_stay.identity
    assert not half_stay.identity
    assert torch.equal(half_stay.cos[:4], torch.ones_like(half_stay.cos[:4]))
    assert torch.equal(half_stay.sin[:4], torch.zeros_like(half_stay.sin[:4]))
    assert torch.equal(bits(rotate(x, all_stay)), bits(x))
    assert torch.equal(bits(rotate(x, half_stay)[:4]), bits(x[:4]))
    for rotation, kept in ((all_stay, 8), (half_stay, 4)):
        pool = torch.full((8, HEADS, 16), math.nan, dtype=dtype)
        scatter_rotated(pool, torch.arange(8), x, rotation)
        assert torch.equal(bits(pool[:kept]), bits(x[:kept]))


def test_the_result_of_an_identity_is_a_copy() -> None:
    x = torch.ones(2, HEADS, 16)
    at = torch.tensor([3, 4])
    rotate(x, rotation_between(TABLES["neox"], at, at)).zero_()
    assert x.min() == 1


@pytest.mark.parametrize("pool_dtype", PAYLOADS, ids=str)
@pytest.mark.parametrize("dtype", PAYLOADS, ids=str)
@pytest.mark.parametrize("head_dim", [16, 17], ids=["aligned", "odd"])
@pytest.mark.parametrize("move", ["all", "some", "none"])
def test_scatter_writes_rotated_rows_and_no_others(
    pool_dtype: torch.dtype, dtype: torch.dtype, head_dim: int, move: str
) -> None:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(40, HEADS, head_dim, generator=generator).to(dtype)
    slots = torch.randperm(64, generator=generator)[:40]
    source = positions(40, generator)
    target = {"all": (source + 5) % MAX_POSITION, "none": source.clone()}.get(move)
    if target is None:
        target = torch.where(torch.arange(40) % 3 == 0, source, (source + 5) % MAX_POSITION)
    rotation = rotation_between(TABLES["neox"], source, target)
    pool = torch.full((64, HEADS, head_dim), math.nan, dtype=pool_dtype)

    scatter_rotated(pool, slots, x, rotation)

    untouched = torch.ones(64, dtype=torch.bool)
    untouched[slots] = False
    assert torch.equal(pool[slots], rotate(x, rotation, out_dtype=pool_dtype))
    assert pool[untouched].isnan().all()


def test_scatter_takes_views_of_pages_and_of_pools() -> None:
    """A layer of [pages, layers, page, heads, head_dim], into one half of a fused KV buffer."""
    generator = torch.Generator().manual_seed(7)
    payload = torch.randn(2, 3, 4, HEADS, 32, generator=generator)
    x = payload[:, 1, :, :, 8:24].flatten(0, 1)
    fused = torch.full((16, 2, HEADS, 16), math.nan)
    slots = torch.tensor([4, 5, 6, 7, 12, 13, 14, 15])
    rotation = rotation_between(TABLES["neox"], torch.arange(8), torch.arange(8) + 100)

    scatter_rotated(fused[:, 1], slots, x, rotation)

    assert torch.equal(fused[slots, 1], rotate(x, rotation))
    assert fused[:, 0].isnan().all()


def test_runs_longer_than_the_scratch_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(50, HEADS, 16, generator=generator)
    rotation = rotation_between(TABLES["neox"], positions(50, generator), torch.arange(50))
    whole = rotate(x, rotation)
    monkeypatch.setattr("kvws.kernels.rerope.reference.SCRATCH_BYTES", 7 * 4 * HEADS * 16)
    pool = torch.full((50, HEADS, 16), math.nan)
    scatter_rotated(pool, torch.arange(50), x, rotation)
    assert torch.equal(pool, whole)
    assert torch.equal(rotate(x, rotation), whole)


def test_no_tokens_is_no_work() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    rotation = rotation_between(TABLES["neox"], none, none)
    assert rotate(torch.zeros(0, HEADS, 16), rotation).shape == (0, HEADS, 16)
    pool = torch.zeros(4, HEADS, 16)
    scatter_rotated(pool, none, torch.zeros(0, HEADS, 16), rotation)
    assert not pool.any()


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (None, None, "cannot both be None"),
        ([0, 512], [0, 1], r"source_positions .* expected 0 to 511, got 0 to 512"),
        ([0, 1], [-1, 1], r"target_positions .* expected 0 to 511, got -1 to 1"),
        ([0, 1], [0], r"expected \(2,\), got \(1,\)"),
        ([[0]], [[0]], r"source_positions must be \[n\] int64, got \(1, 1\)"),
    ],
)
def test_positions_that_cannot_be(
    source: list[int] | None, target: list[int] | None, message: str
) -> None:
    ends = [None if end is None else torch.tensor(end) for end in (source, target)]
    with pytest.raises(ValueError, match=message):
        rotation_between(TABLES["neox"], *ends)


def test_errors_name_what_was_expected_and_what_came() -> None:
    two = torch.arange(2)
    rotation = rotation_between(TABLES["neox"], two, two + 1)
    x, pool = torch.zeros(2, HEADS, 16), torch.zeros(8, HEADS, 16)
    with pytest.raises(ValueError, match=r"x must be \[n, heads, head_dim\], got \(2, 48\)"):
        rotate(x.flatten(1), rotation)
    with pytest.raises(ValueError, match="one row per token: expected 1, got 2"):
        rotate(x[:1], rotation)
    with pytest.raises(ValueError, match="expected at most 8, got 16"):
        rotate(x[..., :8], rotation)
    with pytest.raises(ValueError, match=r"expected \[slots, 3, 16\], got \(8, 2, 16\)"):
        scatter_rotated(pool[:, :2], two, x, rotation)
    with pytest.raises(ValueError, match=r"expected \(2,\) torch.int64, got \(2,\) torch.int32"):
        scatter_rotated(pool, two.int(), x, rotation)
    with pytest.raises(ValueError, match="expected 0 to 7, got 7 to 8"):
        scatter_rotated(pool, two + 7, x, rotation)
    assert not pool.any(), "a refused scatter writes nothing"
    with pytest.raises(ConfigError, match=r"unsupported dtype.*got torch.float64"):
        rotate(x.double(), rotation)
    with pytest.raises(ConfigError, match=r"out_dtype.*got torch.int8"):
        rotate(x, rotation, out_dtype=torch.int8)
