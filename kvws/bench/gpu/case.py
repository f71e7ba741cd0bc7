"""One operation on one set of inputs: by its kernel, by its reference, and how far apart they may
be."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

BLOCK_TOKENS = 32

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Sizes:
    """Of the inputs; each operation takes what it needs."""

    layers: int
    blocks: int
    kv_heads: int
    query_heads: int
    head_dim: int
    query_tokens: int

    @property
    def tokens(self) -> int:
        return self.blocks * BLOCK_TOKENS


INTERPRETED = Sizes(
    layers=2, blocks=5, kv_heads=2, query_heads=6, head_dim=64, query_tokens=5
)
"""A program costs the interpreter 5 to 11 ms."""

CHECKED = Sizes(
    layers=4, blocks=1027, kv_heads=8, query_heads=32, head_dim=128, query_tokens=33
)
"""Of no size that a kernel divides its work by."""


@dataclass(frozen=True)
class Tolerance:
    """How far a kernel may be from its reference.

    Attributes:
        text: in words.
        share: of (got, expected): the largest deviation over what is allowed there. More than 1,
            or not a number, fails.
    """

    text: str
    share: Callable[[Tensors, Tensors], float]


@dataclass(frozen=True)
class Prepared:
    """Inputs in place.

    Attributes:
        kernel, reference: run the operation once and return what it writes.
        moved_bytes: the least that has to be read and written: each input and output once.
        multiplications: of matrix products, counted as one multiplication and one addition each.
    """

    kernel: Callable[[], Tensors]
    reference: Callable[[], Tensors]
    tolerance: Tolerance
    moved_bytes: int
    multiplications: int = 0


@dataclass(frozen=True)
class Case:
    """One kernel in one variant.

    Attributes:
        prepare: makes inputs of given sizes on a device.
        timed: sizes at which it is timed on a GPU as well; None for checks alone.
        needed_bytes: device memory without which it is left out.
        only_on: a device type outside of which it does not run.
    """

    kernel: str
    variant: str
    prepare: Callable[[Sizes, torch.device], Prepared]
    timed: Sizes | None = None
    needed_bytes: int = 0
    only_on: str | None = None


def within_rounding(dtype: torch.dtype) -> Tolerance:
    """fp32 to its rounding, whatever the order of operations; narrower results to one unit in
    their last place."""
    unit = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps
    text = "4e-6" if dtype == torch.float32 else "4e-6 + 1 ulp"
    return Tolerance(text, lambda got, expected: _largest_share(got, expected, 4e-6, unit, 0.0))


def close(relative: float, of_largest: float) -> Tolerance:
    """Within a share of the value itself, plus one of the largest value."""
    return Tolerance(
        f"{relative:g} of it + {of_largest:g} of the largest",
        lambda got, expected: _largest_share(got, expected, 0.0, relative, of_largest),
    )


def within(absolute: float) -> Tolerance:
    return Tolerance(
        f"{absolute:g}", lambda got, expected: _largest_share(got, expected, absolute, 0.0, 0.0)
    )


def _largest_share(
    got: Tensors, expected: Tensors, absolute: float, relative: float, of_largest: float
) -> float:
    """In pieces along the first axis, so that large tensors are not copied in double precision."""
    worst = 0.0
    for one, other in zip(got, expected, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return math.inf
        floor = absolute + (of_largest * _largest_magnitude(other) if of_largest else 0.0)
        for a, b in zip(*(torch.split(x, _rows(one)) for x in (one, other)), strict=True):
            allowed = floor + relative * b.double().abs()
            worst = max(worst, _share(a.double(), b.double(), allowed))
    return worst


def _share(a: torch.Tensor, b: torch.Tensor, allowed: torch.Tensor) -> float:
    """NaN beside NaN, and infinity beside the same one, deviate by nothing."""
    deviation = (a - b).abs().masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0)
    share = torch.where(deviation == 0, 0.0, deviation / allowed)
    worst = share.nan_to_num(nan=math.inf, posinf=math.inf)
    return float(worst.max()) if share.numel() else 0.0


def _largest_magnitude(x: torch.Tensor) -> float:
    return max((float(part.float().abs().max()) for part in torch.split(x, _rows(x))), default=0.0)


def _rows(x: torch.Tensor) -> int:
    """Rows of a piece of some 64 MB in double precision."""
    return max(1, (8 << 20) // max(1, x[:1].numel()))


def equal() -> Tolerance:
    """Bit for bit."""
    return Tolerance(
        "equal",
        lambda got, expected: (
            0.0 if all(map(torch.equal, got, expected)) and len(got) == len(expected) else math.inf
        ),
    )


def random_normal(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, *, seed: int = 0
) -> torch.Tensor:
    """Standard normal values, rows of the first axis at a time: large tensors have no twin."""
    generator = torch.Generator(device).manual_seed(seed)
    out = torch.empty(shape, dtype=dtype, device=device)
    for part in torch.split(out, _rows(out)):
        part.copy_(torch.randn(part.shape, generator=generator, device=device))
    return out
