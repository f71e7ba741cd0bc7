"""Scores by the token that a query looks for, against plain loops in fp64."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from kvws.errors import ConfigError
from kvws.kernels.token_scores import (
    TokenFormat,
    decode,
    format_of,
    integers,
    largest_logits,
    token_scores,
)

FORMATS: tuple[TokenFormat, ...] = get_args(TokenFormat)
KV_HEADS, BLOCKS, TOKENS, HEAD_DIM = 2, 11, 5, 16
GROUPS = (3, 1)
CANDIDATES = torch.tensor([False, True, True, True, False, False, True, True, True, True, False])

with_integers = pytest.mark.skipif(
    not integers.cpu_multiplies_bytes(), reason="this CPU has no VNNI"
)
every_format = pytest.mark.parametrize("format", FORMATS)


def stored(format: TokenFormat) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    if format == "means":
        return (torch.randn(KV_HEADS, BLOCKS, 1, HEAD_DIM, generator=generator).half(),)
    scales = torch.rand(KV_HEADS, BLOCKS, 32, generator=generator).half()
    if format == "int8":
        shape = (KV_HEADS, BLOCKS, 32, HEAD_DIM)
        codes = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
    else:
        shape = (KV_HEADS, BLOCKS, 32, HEAD_DIM // 2)
        codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return scales, codes


def asked() -> list[torch.Tensor]:
    """More query heads at the first KV head than at the second."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(TOKENS, group, HEAD_DIM, generator=generator) for group in GROUPS]


def key(format: TokenFormat, parts: tuple[torch.Tensor, ...], at: tuple[int, ...]) -> list[float]:
    """One token's key, a dimension at a time."""
    if format == "means":
        return parts[0][at].double().tolist()
    scale, codes = float(parts[0][at]), parts[1][at].tolist()
    if format == "int4":
        codes = [code % 16 - 8 for code in codes] + [code // 16 - 8 for code in codes]
    return [scale * code for code in codes]


def oracle(format: TokenFormat, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    wanted = CANDIDATES.nonzero().flatten().tolist()
    total = [0.0] * BLOCKS
    for head, queries in enumerate(asked()):
        for of_head in queries.transpose(0, 1).tolist():
            best = dict.fromkeys(wanted, -math.inf)
            for q in of_head:
                logits: list[float] = []
                for block in wanted:
                    keys = [key(format, parts, (head, block, t)) for t in range(parts[0].shape[2])]
                    logits.append(max(sum(x * y for x, y in zip(q, k, strict=True)) for k in keys))
                mean = sum(logits) / len(logits)
                deviation = math.sqrt(sum((x - mean) ** 2 for x in logits) / len(logits))
                for block, logit in zip(wanted, logits, strict=True):
                    best[block] = max(best[block], (logit - mean) / deviation)
            for block in wanted:
                total[block] += best[block]
    return torch.tensor(total, dtype=torch.float64)


def cut(parts: tuple[torch.Tensor, ...], size: int) -> list[tuple[torch.Tensor, ...]]:
    return list(zip(*(part.split(size, dim=1) for part in parts), strict=True))


@pytest.mark.parametrize("size", [BLOCKS, 4])
@every_format
def test_the_score_is_the_stated_sum_however_the_index_is_cut(
    format: TokenFormat, size: int
) -> None:
    parts = stored(format)
    got = token_scores(
        asked(), cut(parts, size), CANDIDATES.split(size), implementation="reference"
    )
    torch.testing.assert_close(got.double(), oracle(format, parts), atol=1e-4, rtol=1e-4)


@every_format
def test_other_blocks_score_zero_and_are_never_read(format: TokenFormat) -> None:
    parts = stored(format)
    clean = token_scores(asked(), cut(parts, 4), CANDIDATES.split(4))
    parts[0][:, ~CANDIDATES] = math.nan
    got = token_scores(asked(), cut(parts, 4), CANDIDATES.split(4))
    assert torch.equal(got, clean) and not got[~CANDIDATES].any()


@with_integers
@pytest.mark.parametrize("size", [BLOCKS, 4])
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_integer_products_give_the_stated_sum_as_well(format: TokenFormat, size: int) -> None:
    parts = stored(format)
    parts[0][:, ~CANDIDATES] = math.nan
    got = token_scores(
        asked(), cut(parts, size), CANDIDATES.split(size), implementation="integers"
    )
    torch.testing.assert_close(got.double(), oracle(format, parts), atol=1e-4, rtol=1e-4)
    assert not got[~CANDIDATES].any()


@with_integers
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_integer_products_are_within_what_they_promise(size: float) -> None:
    """The largest codes and entries there are, rows of zeros, and more dimensions than a head."""
    generator = torch.Generator().manual_seed(3)
    rows = size * torch.randn(9, integers.HEAD_DIM_MAX, generator=generator)
    rows[3], rows[4] = 0.0, size
    codes = torch.randint(-127, 128, (4, 32, rows.shape[1]), generator=generator, dtype=torch.int8)
    codes[0] = 127
    tile = [(torch.full((4, 32), 0.5).half(), codes)]
    every = [torch.ones(4, dtype=torch.bool)]
    got = largest_logits(rows, tile, every, implementation="integers")
    expected = largest_logits(rows, tile, every, implementation="reference")
    promised = (
        2**-15 * rows.abs().amax(dim=1) * (0.5 * codes.abs().sum(dim=2).amax(dim=1)[:, None])
    )
    assert bool(((got - expected).abs() <= promised + 1e-5 * expected.abs()).all())


@with_integers
@pytest.mark.parametrize("products_bytes", [1, 8 * 32 * 4 * 3, 1 << 30])
@pytest.mark.parametrize("rows_at_once", [1, 4, 100])
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_integer_products_are_the_same_however_they_are_cut(
    format: TokenFormat, rows_at_once: int, products_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = torch.randn(9, HEAD_DIM, generator=torch.Generator().manual_seed(4))
    tile = tuple(part[0] for part in stored(format))
    whole = largest_logits(rows, [tile], [CANDIDATES], implementation="integers")
    monkeypatch.setattr(integers, "ROWS_AT_ONCE", rows_at_once)
    monkeypatch.setattr(integers, "PRODUCTS_BYTES", products_bytes)
    cut = largest_logits(rows, [tile], [CANDIDATES], implementation="integers")
    assert whole.shape == (int(CANDIDATES.sum()), 9) and torch.equal(cut, whole)


@with_integers
def test_integer_products_rank_blocks_as_the_reference_does() -> None:
    generator = torch.Generator().manual_seed(4)
    scales = (0.05 + 0.02 * torch.rand(1, 1000, 32, generator=generator)).half()
    shape = (1, 1000, 32, 64)
    codes = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
    given = (
        [torch.randn(32, 3, 64, generator=generator)],
        [(scales, codes)],
        [torch.ones(1000, dtype=torch.bool)],
    )
    one = token_scores(*given, implementation="integers")
    other = token_scores(*given, implementation="reference")
    first, second = torch.combinations(torch.arange(1000)).unbind(dim=1)
    same = (one[first] < one[second]) == (other[first] < other[second])
    assert float(same.float().mean()) >= 0.999


def test_integer_products_are_refused_where_they_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(integers, "cpu_multiplies_bytes", lambda: True)
    parts = stored("means")
    with pytest.raises(ConfigError, match="codes of at most 512 dimensions, got means of 16"):
        token_scores(asked(), [parts], [CANDIDATES], implementation="integers")
    monkeypatch.setattr(integers, "cpu_multiplies_bytes", lambda: False)
    parts = stored("int8")
    with pytest.raises(ConfigError, match="a CPU with AVX512 VNNI"):
        token_scores(asked(), [parts], [CANDIDATES], implementation="integers")
    automatic = token_scores(asked(), [parts], [CANDIDATES])
    reference = token_scores(asked(), [parts], [CANDIDATES], implementation="reference")
    assert torch.equal(automatic, reference)


@every_format
def test_largest_logits_are_those_of_the_best_key(format: TokenFormat) -> None:
    parts = tuple(part[1] for part in stored(format))
    rows = asked()[0].flatten(0, 1)
    got = largest_logits(rows, [parts], [CANDIDATES])
    keys = decode(format, parts)[CANDIDATES]
    expected = torch.einsum("btd,rd->btr", keys.double(), rows.double()).amax(dim=1)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, atol=1e-2, rtol=1e-4)


@every_format
def test_dtypes_tell_the_format(format: TokenFormat) -> None:
    assert format_of(stored(format)) == format


@every_format
def test_a_tile_without_blocks_or_candidates_changes_nothing(format: TokenFormat) -> None:
    parts, none = stored(format), torch.zeros_like(CANDIDATES)
    tiles = [tuple(part[:, :0] for part in parts), parts, parts]
    got = token_scores(asked(), tiles, [none[:0], none, CANDIDATES])
    alone = token_scores(asked(), [parts], [CANDIDATES])
    assert not got[:BLOCKS].any() and torch.equal(got[BLOCKS:], alone)


def test_without_tiles_candidates_heads_or_tokens_there_is_nothing() -> None:
    parts, none = stored("int8"), torch.zeros(BLOCKS, dtype=torch.bool)
    assert token_scores(asked(), [], []).shape == (0,)
    zeros = torch.zeros(BLOCKS)
    assert torch.equal(token_scores(asked(), [parts], [none]), zeros)
    assert torch.equal(token_scores([], [()], [CANDIDATES]), zeros)
    assert torch.equal(token_scores([q[:0] for q in asked()], [parts], [CANDIDATES]), zeros)
    rows = torch.zeros(3, HEAD_DIM)
    assert largest_logits(rows, [], []).shape == (0, 3)
    assert largest_logits(rows[:0], [tuple(p[0] for p in parts)], [CANDIDATES]).shape == (7, 0)


def test_errors_name_what_was_expected_and_what_came() -> None:
    queries, parts = asked(), stored("int8")
    scales, codes = parts
    with pytest.raises(ConfigError, match=r"no known format: got torch.float32 and torch.int8"):
        token_scores(queries, [(scales.float(), codes)], [CANDIDATES])
    with pytest.raises(ConfigError, match=r"queries\[1\] has an unsupported dtype.*float16"):
        token_scores([queries[0], queries[1].half()], [parts], [CANDIDATES])
    with pytest.raises(ValueError, match="one mask per tile: expected 1, got 2"):
        token_scores(queries, [parts], [CANDIDATES, CANDIDATES])
    with pytest.raises(ValueError, match=r"expected \(11,\) torch.bool, got \(10,\) torch.bool"):
        token_scores(queries, [parts], [CANDIDATES[1:]])
    with pytest.raises(ValueError, match=r"tiles\[0\] .*\(1, 11, 32\), got \(2, 11, 32\)"):
        token_scores(queries[:1], [parts], [CANDIDATES])
    with pytest.raises(ValueError, match=r"expected \(2, 11, 32, 16\), got \(2, 11, 32, 8\)"):
        token_scores(queries, [(scales, codes[..., :8])], [CANDIDATES])
    with pytest.raises(ValueError, match=r"tiles\[1\] must have the first tile's dtypes"):
        token_scores(queries, [parts, stored("int4")], [CANDIDATES, CANDIDATES])
    with pytest.raises(ValueError, match="one query each"):
        token_scores([queries[0], queries[1][1:]], [parts], [CANDIDATES])
    with pytest.raises(ValueError, match=r"rows must be \[rows, head_dim\], got \(5, 3, 16\)"):
        largest_logits(queries[0], [parts], [CANDIDATES])
    with pytest.raises(ValueError, match="head_dim must be even for int4, got 15"):
        odd = stored("int4")
        largest_logits(torch.zeros(1, 15), [tuple(p[0] for p in odd)], [CANDIDATES])
