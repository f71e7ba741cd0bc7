"""Triton's kernels over operands whose elements lie more than 2³¹ apart, in its interpreter.

Not collected by name: test_offsets.py runs this file in a process of its own, because
TRITON_INTERPRET counts only before triton is imported. A stride below 2³¹ is a 32-bit argument of
a kernel; times an index that is 32 bits wide as well it would wrap around, and the kernel read or
write somewhere else (often nowhere: then this process dies). Memory is reserved, not used: only
the pages that are written exist.
"""

from __future__ import annotations

import mmap

import pytest
import torch

from kvws.kernels.mean_k import mean_raw_k
from kvws.kernels.quant import Format, Side, dequantise, quantise
from kvws.kernels.rerope import Rotation, rotate, rotation_between, scatter_rotated
from kvws.kernels.rotary import RotaryTable
from kvws.kernels.score import mean_k_scores

FAR = 2**31
"""Elements: where the offset that matters begins."""

MAP_NORESERVE = 0x4000
"""Linux's flag, which Python's module doesn't name: what is mapped need not be there."""

_ANGLES = torch.arange(64).unsqueeze(1) * 10000.0 ** (-torch.arange(4) / 4)
TABLE = RotaryTable(_ANGLES.cos(), _ANGLES.sin(), interleaved=False)


def apart(x: torch.Tensor, axis: int) -> torch.Tensor:
    """x's values in memory where the last index of `axis` is at least FAR elements away, at a
    stride that 32 bits hold; the other axes lie close together."""
    far = -(-FAR // (x.shape[axis] - 1))
    assert far < FAR, "the axis needs three entries"
    strides, stride = [0] * x.dim(), 1
    for other in reversed(range(x.dim())):
        if other != axis:
            strides[other], stride = stride, stride * x.shape[other]
    assert stride < far, "one entry of the axis must not reach into the next"
    strides[axis] = far
    reach = (far * (x.shape[axis] - 1) + stride) * x.element_size()
    memory = mmap.mmap(-1, reach, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    view = torch.frombuffer(memory, dtype=x.dtype).as_strided(x.shape, strides)
    return view.copy_(x)


def keys(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).half()


def moves(tokens: int) -> Rotation:
    at = torch.arange(tokens)
    return rotation_between(TABLE, at, (at + 9) % 64)


@pytest.mark.parametrize("axis", range(3))
def test_rotate_reads_far_away(axis: int) -> None:
    x = keys(19, 3, 12)
    got = rotate(apart(x, axis), moves(19), implementation="triton")
    expected = rotate(x, moves(19), implementation="reference")
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("axis", range(3))
def test_scatter_writes_far_away(axis: int) -> None:
    x, slots = keys(5, 3, 12), torch.tensor([18, 0, 7, 17, 3])
    pool, expected = apart(torch.zeros(19, 3, 12).half(), axis), torch.zeros(19, 3, 12).half()
    scatter_rotated(pool, slots, x, moves(5), implementation="triton")
    scatter_rotated(expected, slots, x, moves(5), implementation="reference")
    torch.testing.assert_close(pool, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("axis", range(4))
def test_the_mean_of_keys_far_away(axis: int) -> None:
    k, first = keys(3, 32, 3, 12), torch.tensor([0, 17, 32])
    got = mean_raw_k(apart(k, axis), first, TABLE, implementation="triton")
    expected = mean_raw_k(k, first, TABLE, implementation="reference")
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axis", range(4))
def test_scores_of_an_index_far_away(axis: int) -> None:
    tile, queries = keys(3, 3, 9, 20), keys(3, 4, 6, 20).float()
    candidates = torch.arange(9) != 4
    got = mean_k_scores(queries, [apart(tile, axis)], [candidates], implementation="triton")
    expected = mean_k_scores(queries, [tile], [candidates], implementation="reference")
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axis", range(4))
def test_scores_of_queries_far_away(axis: int) -> None:
    tile, queries = keys(3, 3, 9, 20), keys(3, 4, 6, 20).float()
    candidates = torch.arange(9) != 4
    got = mean_k_scores(apart(queries, axis), [tile], [candidates], implementation="triton")
    expected = mean_k_scores(queries, [tile], [candidates], implementation="reference")
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


QUANTISATIONS: tuple[tuple[Format, Side], ...] = (
    ("int8", "keys"),
    ("int4", "keys"),
    ("int4", "values"),
    ("fp8", "keys"),
)


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize(("format", "side"), QUANTISATIONS)
def test_quantise_reads_far_away(format: Format, side: Side, axis: int) -> None:
    x = keys(3, 4, 3, 96)
    codes, scales = quantise(apart(x, axis), format, side, implementation="triton")
    expected_codes, expected_scales = quantise(x, format, side, implementation="reference")
    assert torch.equal(codes, expected_codes)
    assert torch.equal(scales, expected_scales)


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize(("format", "side"), QUANTISATIONS)
def test_dequantise_writes_far_away(format: Format, side: Side, axis: int) -> None:
    x = keys(3, 4, 3, 96)
    codes, scales = quantise(x, format, side, implementation="reference")
    out, expected = apart(torch.zeros_like(x), axis), torch.zeros_like(x)
    dequantise(codes, scales, format, side, out, implementation="triton")
    dequantise(codes, scales, format, side, expected, implementation="reference")
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize(("format", "side"), QUANTISATIONS)
def test_dequantise_reads_blocks_far_away(format: Format, side: Side) -> None:
    x = keys(3, 4, 3, 96)
    codes, scales = quantise(x, format, side, implementation="reference")
    out, expected = torch.zeros_like(x), torch.zeros_like(x)
    parts = (apart(codes, 0), apart(scales, 0))
    dequantise(*parts, format, side, out, implementation="triton")
    dequantise(codes, scales, format, side, expected, implementation="reference")
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=0)
