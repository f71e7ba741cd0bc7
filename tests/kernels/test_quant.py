"""What quantisation keeps, against the step sizes and plain loops; where the bits lie, by hand."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from kvws.errors import ConfigError
from kvws.kernels.quant import (
    Format,
    Side,
    codes_shape,
    dequantise,
    quantise,
    scales_shape,
)

SEEDS = (0, 1, 2)
FORMATS: tuple[Format, ...] = get_args(Format)
SIDES: tuple[Side, ...] = get_args(Side)
PAYLOADS = (torch.float32, torch.float16, torch.bfloat16)
LEVELS = {"int8": 255, "int4": 15}

every_format = pytest.mark.parametrize("format", FORMATS)
every_side = pytest.mark.parametrize("side", SIDES)
integers = pytest.mark.parametrize("format", ["int8", "int4"])


def restored(
    x: torch.Tensor, format: Format, side: Side, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    out = torch.full(x.shape, math.nan, dtype=dtype)
    dequantise(*quantise(x, format, side), format, side, out)
    return out


def blocks(seed: int, shape: tuple[int, ...] = (3, 32, 2, 64)) -> torch.Tensor:
    """Channels of very different sizes and offsets."""
    generator = torch.Generator().manual_seed(seed)
    size = 10.0 ** (4 * torch.rand(shape[3], generator=generator) - 2)
    offset = 10.0 ** (3 * torch.rand(shape[3], generator=generator) - 1)
    return torch.randn(shape, generator=generator) * size + offset


def group_of(x: torch.Tensor, format: Format, side: Side, at: tuple[int, ...]) -> torch.Tensor:
    """The values that share a grid with x[at], by the rule."""
    block, token, head, dim = at
    if format == "fp8":
        return x[block, :, head, :]
    if side == "keys":
        return x[block, :, head, dim]
    run = math.gcd(x.shape[3], 32) if format == "int4" else x.shape[3]
    return x[block, token, head, dim // run * run : (dim // run + 1) * run]


def bound(x: torch.Tensor, format: Format, side: Side, at: tuple[int, ...]) -> float:
    """Largest error that the format allows x[at], from its group alone, in fp64."""
    group = group_of(x, format, side, at).double().clamp(-60000, 60000)
    value = abs(float(x[at]))
    rounding = 2e-7 * float(group.abs().max())
    if format == "fp8":
        scale = float(group.abs().max()) / 448 * (1 + 2**-7)
        return max(value / 16, scale / 1024) * (1 + 1e-5) + 2**-126
    low, high = float(group.min()), float(group.max())
    widened = high - low + abs(low) * 2**-10 + 2**-24  # low is rounded down to float16
    return widened / LEVELS[format] * (1 + 2**-7) / 2 + rounding


def assert_within_bounds(x: torch.Tensor, got: torch.Tensor, format: Format, side: Side) -> None:
    """Every value of a sample; loops, so that the rule is written down twice."""
    generator = torch.Generator().manual_seed(0)
    for index in torch.randint(0, x.numel(), (400,), generator=generator).tolist():
        at = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), x.shape))
        error = abs(float(got[at]) - float(x[at]))
        assert error <= bound(x, format, side, at), f"{at}: {float(x[at])} → {float(got[at])}"


@pytest.mark.parametrize("seed", SEEDS)
@every_side
@every_format
def test_errors_stay_within_half_a_step(format: Format, side: Side, seed: int) -> None:
    x = blocks(seed)
    assert_within_bounds(x, restored(x, format, side), format, side)


@every_side
@integers
def test_control_the_bound_is_tight(format: Format, side: Side) -> None:
    """Three quarters of it are exceeded: a grid of another group or a truncation is seen."""
    x = blocks(0)
    got = restored(x, format, side)
    step = (x.amax(1) - x.amin(1)) / LEVELS[format]
    if side == "values":
        run = 32 if format == "int4" else 64
        runs = x.unflatten(3, (-1, run))
        step = ((runs.amax(4) - runs.amin(4)) / LEVELS[format]).repeat_interleave(run, 3)
    else:
        step = step.unsqueeze(1)
    assert ((got - x).abs() / step).max() > 0.75 / 2
    with pytest.raises(AssertionError, match="→"):
        assert_within_bounds(x, x + 0.6 * step, format, side)


@pytest.mark.parametrize("dtype", PAYLOADS, ids=str)
@every_side
@every_format
def test_every_payload_dtype_is_quantised_in_fp32(
    format: Format, side: Side, dtype: torch.dtype
) -> None:
    x = blocks(1).to(dtype)
    codes, scales = quantise(x, format, side)
    wide_codes, wide_scales = quantise(x.float(), format, side)
    assert torch.equal(codes, wide_codes) and torch.equal(scales, wide_scales)
    assert torch.equal(restored(x, format, side, dtype), restored(x, format, side).to(dtype))


@every_side
@integers
def test_points_of_the_grid_come_back_exactly(format: Format, side: Side) -> None:
    """low -3, step 1/8; every group has its lowest and its highest code."""
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(0, LEVELS[format] + 1, (2, 32, 2, 64), generator=generator)
    codes[..., ::32], codes[..., 1::32] = 0, LEVELS[format]
    codes[:, 0, :, ::2], codes[:, 0, :, 1::2] = 0, LEVELS[format]
    codes[:, 1] = LEVELS[format] - codes[:, 0]
    x = codes / 8 - 3
    assert torch.equal(restored(x, format, side), x)


@every_side
def test_fp8_numbers_come_back_exactly(side: Side) -> None:
    """All finite e4m3 numbers; the largest, 448, makes the scale 1."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    x = numbers.nan_to_num(0.0).view(1, 4, 1, 64)
    assert torch.equal(restored(x, "fp8", side), x)


def test_int4_packs_the_earlier_tokens_into_low_halves() -> None:
    tokens = torch.tensor([0.0, 1.0, 15.0, 7.0])
    x = tokens.view(1, 4, 1, 1).expand(1, 4, 1, 2) * torch.tensor([1.0, 2.0])
    codes, scales = quantise(x, "int4", "keys")
    assert codes.tolist() == [[[[0xF0, 0xF0]], [[0x71, 0x71]]]]
    steps, lows = scales[0]
    assert steps.view(torch.bfloat16).tolist() == [[1.0, 2.0]]
    assert lows.view(torch.float16).tolist() == [[0.0, 0.0]]


def test_where_int8_and_fp8_bits_lie() -> None:
    x = torch.tensor([[-1.0, 254.0], [255.0, 0.0]]).view(1, 2, 1, 2)
    codes, scales = quantise(x, "int8", "values")
    assert codes.flatten().tolist() == [0, 255, 255, 0]
    assert scales.shape == (1, 2, 2, 1, 1)
    assert scales[0, 0].view(torch.bfloat16).flatten().tolist() == [1.0, 1.0]
    assert scales[0, 1].view(torch.float16).flatten().tolist() == [-1.0, 0.0]
    codes, scales = quantise(torch.tensor([448.0, -1.0]).view(1, 1, 1, 2), "fp8", "keys")
    assert codes.flatten().tolist() == [0x7E, 0xB8]
    assert scales.view(torch.bfloat16).flatten().tolist() == [1.0]


@pytest.mark.parametrize("value", [0.0, 1.0, -3.75, 1e-6, 3.1e4, math.pi])
@every_side
@every_format
def test_constant_blocks(format: Format, side: Side, value: float) -> None:
    """Exact where float16 holds the constant; else as close as the format's relative error."""
    x = torch.full((2, 32, 2, 64), value)
    got = restored(x, format, side)
    if format == "fp8":
        assert ((got - x).abs() <= x.abs() / 16).all()
    elif float(torch.tensor(value).half()) == value:
        assert torch.equal(got, x)
    else:
        assert ((got - x).abs() <= x.abs() * 2**-10 / LEVELS[format] + 2**-24).all()
    assert torch.equal(restored(torch.zeros_like(x), format, side), torch.zeros_like(x))


@pytest.mark.parametrize("size", [3e4, 1e-6, 1e-12, 1e-37], ids=str)
@every_side
@every_format
def test_scales_neither_overflow_nor_vanish(format: Format, side: Side, size: float) -> None:
    generator = torch.Generator().manual_seed(9)
    x = (2 * torch.rand(2, 32, 2, 64, generator=generator) - 1) * size
    x[:, ::7] *= 1e-3
    got = restored(x, format, side)
    assert_within_bounds(x, got, format, side)
    assert got.isfinite().all() and got.abs().max() > 0.5 * size


@pytest.mark.parametrize("outlier", [3e4, -3e4])
@integers
def test_an_outlier_costs_its_own_channel_alone(format: Format, outlier: float) -> None:
    x = blocks(2)
    plain = restored(x, format, "keys")
    x[1, 4, 1, 7] = outlier
    got = restored(x, format, "keys")
    assert_within_bounds(x, got, format, "keys")
    got[1, :, 1, 7] = plain[1, :, 1, 7]
    assert torch.equal(got, plain)


@pytest.mark.parametrize("value", [math.inf, -math.inf, 1e38, -70000.0])
@every_side
@every_format
def test_larger_magnitudes_saturate(format: Format, side: Side, value: float) -> None:
    x = torch.zeros(1, 32, 1, 64)
    x[0, 3, 0, 5] = value
    got = restored(x, format, side, torch.float16)
    assert got.isfinite().all()
    assert float(got[0, 3, 0, 5]) == pytest.approx(math.copysign(60000, value), rel=0.01)


@every_side
@every_format
def test_a_nan_takes_its_group_and_no_other(format: Format, side: Side) -> None:
    x = blocks(4)
    plain = restored(x, format, side)
    at = (1, 5, 1, 40)
    x[at] = math.nan
    got = restored(x, format, side)
    assert group_of(got, format, side, at).isnan().all()
    group_of(got, format, side, at).copy_(group_of(plain, format, side, at))
    assert torch.equal(got, plain)


@every_side
@every_format
def test_odd_shapes_strides_and_places(format: Format, side: Side) -> None:
    """Head sizes that are no power of two, permuted input, parts of records, strided output."""
    x = blocks(6, (3, 4, 40, 6)).transpose(2, 3)[:, :, ::2]
    codes, scales = quantise(x, format, side)
    assert codes.is_contiguous() and scales.is_contiguous()
    assert codes.shape[1:] == codes_shape(format, 4, 3, 40)
    assert scales.shape[1:] == scales_shape(format, side, 4, 3, 40)
    expected = restored(x.contiguous(), format, side)
    records = torch.zeros(3, codes[0].numel() + 2 * scales[0].numel() + 6, dtype=torch.uint8)
    placed_codes = records[:, : codes[0].numel()].view(codes.shape)
    placed_scales = records[:, codes[0].numel() : -6].view(torch.int16).view(scales.shape)
    placed_codes.copy_(codes)
    placed_scales.copy_(scales)
    out = torch.full((3, 4, 2, 3, 40), math.nan)
    dequantise(placed_codes, placed_scales, format, side, out[:, :, 1])
    assert torch.equal(out[:, :, 1], expected)
    assert out[:, :, 0].isnan().all(), "nothing else is written"


def test_the_input_is_left_alone() -> None:
    for format in FORMATS:
        x = blocks(7)
        quantise(x, format, "keys")
        assert torch.equal(x, blocks(7))


@every_side
@every_format
def test_no_blocks_is_no_work(format: Format, side: Side) -> None:
    none = torch.zeros(0, 32, 2, 64)
    codes, scales = quantise(none, format, side)
    assert codes.shape == (0, *codes_shape(format, 32, 2, 64))
    assert scales.shape == (0, *scales_shape(format, side, 32, 2, 64))
    dequantise(codes, scales, format, side, none)


def test_errors_name_what_was_expected_and_what_came() -> None:
    x = blocks(0)
    with pytest.raises(ConfigError, match="expected one of fp8, int8, int4, got 'int2'"):
        quantise(x, "int2", "keys")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected one of keys, values, got 'k'"):
        quantise(x, "int8", "k")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"unsupported dtype.*got torch.float64"):
        quantise(x.double(), "int8", "keys")
    with pytest.raises(ValueError, match=r"without empty blocks, got \(32, 2, 64\)"):
        quantise(x[0], "int8", "keys")
    with pytest.raises(ValueError, match="expected an even number, got 31"):
        quantise(x[:, 1:], "int4", "keys")
    codes, scales = quantise(x, "int4", "keys")
    with pytest.raises(ValueError, match=r"codes must be \(3, 32, 2, 64\) torch.uint8"):
        dequantise(codes, scales, "int8", "keys", torch.empty_like(x))
    with pytest.raises(ValueError, match=r"scales must be \(3, 2, 2, 64\) torch.int16, got"):
        dequantise(codes, scales.view(torch.bfloat16), "int4", "keys", torch.empty_like(x))
    with pytest.raises(ValueError, match="codes must be contiguous within a block"):
        dequantise(codes.mT.contiguous().mT, scales, "int4", "keys", torch.empty_like(x))
