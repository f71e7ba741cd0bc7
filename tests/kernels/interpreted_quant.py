"""Triton's quantisation against its reference, in Triton's interpreter on the CPU.

Not collected by name: test_triton.py runs this file in a process of its own, because
TRITON_INTERPRET counts only before triton is imported. A program costs the interpreter 5 to
11 ms, so launches stay small.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import get_args

import pytest
import torch

from kvws.kernels.quant import Format, Side, dequantise, quantise

FORMATS: tuple[Format, ...] = get_args(Format)
SIDES: tuple[Side, ...] = get_args(Side)
PAYLOADS = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((2, 32, 1, 64), (2, 6, 2, 24))

every_format = pytest.mark.parametrize("format", FORMATS)
every_side = pytest.mark.parametrize("side", SIDES)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fresh codes and scales are full of ones, so that an unwritten one is seen."""
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda self, *a, **k: new_empty(self, *a, **k).fill_(-1)
    )
    yield


def blocks(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Offsets, outliers, tiny channels, constants and zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x += 10 * torch.randn(shape[3], generator=generator)
    x[..., 3] *= 1e-7
    x[0, 1, 0, 5] = 3e4
    x[0, :, :, ::4] = 3.7
    x[1, :, 0, ::2] = 0
    x[1, 4] = 0
    return x


def unsigned_zeros(scales: torch.Tensor) -> torch.Tensor:
    """A minimum over 0 and -0 may be either; decoded values are the same."""
    return scales.where(scales != -(2**15), 0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", PAYLOADS, ids=str)
@every_side
@every_format
def test_quantise(
    format: Format, side: Side, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = blocks(0, shape).to(dtype).transpose(1, 2).contiguous().transpose(1, 2)
    codes, scales = quantise(x, format, side, implementation="triton")
    expected_codes, expected_scales = quantise(x, format, side, implementation="reference")
    assert torch.equal(unsigned_zeros(scales), unsigned_zeros(expected_scales))
    assert torch.equal(codes, expected_codes)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", PAYLOADS, ids=str)
@every_side
@every_format
def test_dequantise(
    format: Format, side: Side, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    codes, scales = quantise(blocks(1, shape), format, side, implementation="reference")
    apart = [torch.stack((part, part), dim=1)[:, 0] for part in (codes, scales)]
    got, expected = torch.full((2, *shape[:2], 3, *shape[2:]), math.nan, dtype=dtype)
    dequantise(*apart, format, side, got[:, :, 1], implementation="triton")
    dequantise(*apart, format, side, expected[:, :, 1], implementation="reference")
    assert torch.equal(got.isnan(), expected.isnan()), "all of the output and nothing else"
    ulp = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps
    error = (got[:, :, 1].double() - expected[:, :, 1].double()).abs()
    assert (error <= ulp * expected[:, :, 1].double().abs()).all()


def test_every_fp8_number_is_coded_and_decoded() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    x = numbers.nan_to_num(0.0).view(1, 4, 1, 64)
    codes, scales = quantise(x, "fp8", "keys", implementation="triton")
    out = torch.full_like(x, math.nan)
    dequantise(codes, scales, "fp8", "keys", out, implementation="triton")
    assert torch.equal(out, x)


def test_fp8_ties_go_to_even() -> None:
    """Halfway between neighbours, among them subnormals and the step to the normal ones."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat((halves, numbers[-1:], torch.zeros(1))).view(1, 2, 1, 64)
    got, _ = quantise(x, "fp8", "keys", implementation="triton")
    assert torch.equal(got, quantise(x, "fp8", "keys", implementation="reference")[0])


@pytest.mark.parametrize("value", [math.nan, -math.inf], ids=str)
@every_side
@every_format
def test_what_is_no_number_of_float16(format: Format, side: Side, value: float) -> None:
    x = blocks(2, SHAPES[1])
    x[0, 3, 1, 9] = value
    got, expected = torch.zeros_like(x), torch.ones_like(x)
    for out, implementation in ((got, "triton"), (expected, "reference")):
        parts = quantise(x, format, side, implementation=implementation)
        dequantise(*parts, format, side, out, implementation=implementation)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())


@every_format
def test_control_the_other_side_is_caught(format: Format) -> None:
    if format == "fp8":
        pytest.skip("both sides are the same")
    x = blocks(3, SHAPES[0])
    keys, _ = quantise(x, format, "keys", implementation="triton")
    values, _ = quantise(x, format, "values", implementation="reference")
    assert not torch.equal(keys, values)


@every_side
@every_format
def test_no_blocks_is_no_work(format: Format, side: Side) -> None:
    none = torch.zeros(0, 6, 2, 24)
    codes, scales = quantise(none, format, side, implementation="triton")
    dequantise(codes, scales, format, side, none, implementation="triton")
