"""Blocks of the host tier in their pages: against fp64 complex numbers, in torch and in C."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvws.errors import ConfigError
from kvws.kernels.place import place_blocks
from kvws.kernels.rotary import Rotation, rotation_between
from tests.kernels.placing import (
    PAYLOADS,
    POISON,
    SEEDS,
    TOKENS,
    Case,
    assert_close,
    assert_every_half_is_right,
    bits,
    each_case,
    forget,
    needs_compiler,
)

IMPLEMENTATIONS = ("reference", "native")

needs_fused_torch = pytest.mark.skipif(
    float(torch.addcmul(torch.tensor([-1.0]), *[torch.tensor([1 + 2.0**-12])] * 2))
    != (1 + 2.0**-12) ** 2 - 1,
    reason="this torch rounds a product before it is added",
)


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of this module's own, so that the user's takes no part."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        forget()
        yield folder / "kvws" / "native"
    forget()


@needs_compiler
@pytest.mark.parametrize("dtype", PAYLOADS, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_keys_are_turned_and_rounded_once(
    implementation: str, interleaved: bool, dtype: torch.dtype
) -> None:
    for note, case in each_case(dtype, interleaved):
        got = case.place(implementation, case.rotation)[case.pages]
        assert_close(got, case, note)
        passed = case.source[case.blocks][..., case.rotary_dim :]
        assert torch.equal(got[..., case.rotary_dim :], passed), note


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@needs_compiler
def test_control_the_oracle_catches_a_wrong_direction_and_a_wrong_pairing(
    implementation: str,
) -> None:
    case = Case(0, torch.float32, heads=2, head_dim=16, rotary_dim=16)
    r = case.rotation
    for planted in (
        Rotation(r.cos, -r.sin, interleaved=False, identity=False),
        Rotation(r.cos, r.sin, interleaved=True, identity=False),
        Rotation(r.cos.roll(1, 0), r.sin.roll(1, 0), interleaved=False, identity=False),
    ):
        with pytest.raises(AssertionError, match="over the budget"):
            assert_close(case.place(implementation, planted)[case.pages], case, "planted")


@needs_compiler
@needs_fused_torch
@pytest.mark.parametrize("dtype", PAYLOADS, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_both_implementations_give_the_same_bits(interleaved: bool, dtype: torch.dtype) -> None:
    for note, case in each_case(dtype, interleaved):
        by_name = [case.place(name, case.rotation) for name in IMPLEMENTATIONS]
        assert torch.equal(*by_name), note


@needs_compiler
@pytest.mark.parametrize("dtype", PAYLOADS, ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_values_keep_their_bits_and_other_pages_are_untouched(
    implementation: str, dtype: torch.dtype
) -> None:
    for seed in SEEDS:
        case = Case(seed, dtype)
        case.source[case.blocks[0], 0] = torch.nan
        for rotation in (None, case.rotation):
            placed = case.place(implementation, rotation)
            others = torch.ones(placed.shape[0], dtype=torch.bool)
            others[case.pages] = False
            untouched = case.pool.unflatten(0, (-1, TOKENS))[others]
            assert others.any() and torch.equal(placed[others], untouched), f"seed {seed}"
            if rotation is None:
                expected = case.source[case.blocks]
                same = bits(placed[case.pages]) == bits(expected)
                assert same.all(), f"seed {seed}"


@needs_compiler
@pytest.mark.parametrize("dtype", PAYLOADS, ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tokens_that_do_not_move_keep_their_bits(
    implementation: str, dtype: torch.dtype
) -> None:
    """Not-a-numbers and the sign of zero included, beside tokens that do move."""
    case = Case(3, dtype)
    case.source[case.blocks[0], 0], case.source[case.blocks[0], 1] = torch.nan, -0.0
    kept = torch.zeros(len(case.baked), dtype=torch.bool)
    kept[:5] = True
    targets = torch.where(kept, case.baked, case.baked + 1)
    rotation = rotation_between(case.table, case.baked, targets)
    got = case.place(implementation, rotation)[case.pages].flatten(0, 1)
    held = case.source[case.blocks].flatten(0, 1)
    assert (bits(got[kept]) == bits(held[kept])).all()
    assert not (bits(got[~kept]) == bits(held[~kept])).all(), "nothing was moved"

    unmoved = rotation_between(case.table, case.baked, case.baked)
    got = case.place(implementation, unmoved)[case.pages].flatten(0, 1)
    assert unmoved.identity and (bits(got) == bits(held)).all()


@needs_compiler
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_half_precision_number_is_read_and_written_right(
    dtype: torch.dtype, interleaved: bool
) -> None:
    assert_every_half_is_right(dtype, interleaved)


def test_nothing_to_place_is_no_error() -> None:
    case = Case(0, torch.float32)
    case.pages = case.blocks = torch.empty(0, dtype=torch.int64)
    empty = torch.empty(0, case.rotary_dim // 2)
    rotation = Rotation(empty, empty, interleaved=False, identity=True)
    for implementation in ("auto", "reference"):
        assert (case.place(implementation, rotation) == POISON).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pages": torch.tensor([0, 4])}, "pages must be 0 to 3, got 0 to 4"),
        ({"pages": torch.tensor([-1, 1])}, "pages must be 0 to 3, got -1 to 1"),
        ({"blocks": torch.tensor([0, 3])}, "blocks must be 0 to 2, got 0 to 3"),
        ({"blocks": torch.tensor([0])}, "2 pages and 1 blocks"),
        ({"blocks": torch.tensor([0, 1], dtype=torch.int32)}, r"blocks must be \[n\] int64"),
        ({"pool": torch.zeros(128, 2, 4)}, "pool must be .* with source's heads and head_dim"),
        ({"pool": torch.zeros(100, 2, 8)}, "whole pages: expected a multiple of 32 slots"),
        ({"pool": torch.zeros(128, 2, 16)[..., ::2]}, "pool must be contiguous"),
        ({"pool": torch.zeros(128, 2, 8, device="meta")}, "pool must be in CPU memory"),
        ({"source": torch.zeros(3, 32, 2, 16)[..., ::2]}, "each block of source"),
        ({"source": torch.zeros(3, 32, 2, 8).half()}, "source must have pool's dtype"),
        ({"source": torch.zeros(96, 2, 8)}, r"source must be \[blocks, tokens"),
        ({"rotated": 63}, "one row per token: expected 64, got 63"),
        ({"half": 5}, "rotary_dim must not exceed head_dim: expected at most 8, got 10"),
    ],
)
@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_arguments_that_contradict_each_other_are_refused(
    implementation: Any, change: dict[str, Any], message: str
) -> None:
    arguments: dict[str, Any] = {
        "pool": torch.zeros(128, 2, 8),
        "pages": torch.tensor([0, 2]),
        "source": torch.zeros(3, 32, 2, 8),
        "blocks": torch.tensor([2, 1]),
        "rotated": 64,
        "half": 4,
    } | change
    turn = torch.ones(arguments.pop("rotated"), arguments.pop("half"))
    arguments["rotation"] = Rotation(turn, turn, interleaved=False, identity=False)
    with pytest.raises(ValueError, match=message):
        place_blocks(**arguments, implementation=implementation)


def test_other_dtypes_and_unknown_names_are_refused() -> None:
    case = Case(0, torch.float64)
    with pytest.raises(ConfigError, match="pool has an unsupported dtype"):
        case.place("reference", None)
    with pytest.raises(ConfigError, match="expected one of auto, reference, native, got 'triton'"):
        Case(0, torch.float32).place("triton", None)
