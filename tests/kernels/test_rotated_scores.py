"""Scores at a distance: memory, cuts, and what is refused.

That the scores follow the rule, for every kind of rotary table, is told with the signal that asks
for them (tests/recall/test_signal_rotated_mean.py)."""

from __future__ import annotations

import math

import pytest
import torch

from kvws.errors import ConfigError
from kvws.kernels.rotary import RotaryTable
from kvws.kernels.rotated_scores import rotated_scores

LAYERS, TOKENS, QUERY_HEADS, KV_HEADS, HEAD_DIM, PAIRS, BLOCKS = 3, 4, 6, 2, 16, 6, 23
ANGLES = torch.arange(128).unsqueeze(1) * 50.0 ** (-torch.arange(PAIRS) / PAIRS)
TABLE = RotaryTable(ANGLES.cos(), ANGLES.sin(), interleaved=True)
OFFSETS = torch.arange(TOKENS)
GENERATOR = torch.Generator().manual_seed(0)
QUERIES = 3 * torch.randn(LAYERS, TOKENS, QUERY_HEADS, HEAD_DIM, generator=GENERATOR)
MEANS = torch.randn(LAYERS, KV_HEADS, BLOCKS, HEAD_DIM, generator=GENERATOR).half()
VARIANCES = torch.rand(LAYERS, KV_HEADS, BLOCKS, PAIRS, generator=GENERATOR).half()
DISTANCES = torch.randint(0, 128, (BLOCKS,), generator=GENERATOR)
CANDIDATES = torch.rand(BLOCKS, generator=GENERATOR) < 0.7
LIMITS = "kvws.kernels.rotated_scores.reference"


def scores(
    size: int = BLOCKS,
    *,
    means: torch.Tensor = MEANS,
    candidates: torch.Tensor = CANDIDATES,
    distances: torch.Tensor = DISTANCES,
) -> torch.Tensor:
    """Of an index in tiles of `size` blocks."""
    tiles = list(zip(means.split(size, 2), VARIANCES.split(size, 2), strict=True))
    return rotated_scores(
        QUERIES, OFFSETS, tiles, candidates.split(size), distances.split(size), [TABLE] * LAYERS
    )


def term_by_term() -> torch.Tensor:
    """The rule on complex pairs, one head and token at a time; fp64."""
    z = torch.complex(TABLE.cos.double(), TABLE.sin.double())
    means, rotary_dim = MEANS.double(), 2 * PAIRS
    total = torch.zeros(BLOCKS, dtype=torch.float64)
    for layer in range(LAYERS):
        for head in range(QUERY_HEADS):
            mean = means[layer, head // (QUERY_HEADS // KV_HEADS)]
            spread = VARIANCES[layer, head // (QUERY_HEADS // KV_HEADS)].double()
            far = torch.view_as_complex(mean[:, :rotary_dim].reshape(BLOCKS, PAIRS, 2))
            far = far * z[DISTANCES].conj()
            for token in range(TOKENS):
                q = QUERIES[layer, token, head].double()
                turned = torch.view_as_complex(q[:rotary_dim].reshape(PAIRS, 2)) * z[token]
                logits = (turned.conj() * far).real.sum(dim=1)
                logits += mean[:, rotary_dim:] @ q[rotary_dim:]
                logits /= math.sqrt(HEAD_DIM)
                logits += spread @ turned.abs().square() / (4 * HEAD_DIM)
                logits[~CANDIDATES] = -torch.inf
                total += logits.softmax(dim=0)
    return total


@pytest.mark.parametrize("size", [BLOCKS, 9, 1])
def test_the_score_is_the_stated_sum_however_the_index_is_cut(size: int) -> None:
    got = scores(size)
    torch.testing.assert_close(got.double(), term_by_term(), atol=1e-4, rtol=1e-4)
    assert not got[~CANDIDATES].any()


@pytest.mark.parametrize(
    "limits",
    [
        ("KEYS_BYTES",),  # chunks of one piece
        ("LOGITS_BYTES", "ROWS_MIN"),  # rows one by one
        ("COPIES_BYTES",),  # layers one by one
        ("KEYS_BYTES", "LOGITS_BYTES", "ROWS_MIN", "COPIES_BYTES"),
    ],
    ids=" ".join,
)
def test_what_fits_memory_does_not_show(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[str, ...]
) -> None:
    whole = scores()
    for limit in limits:
        monkeypatch.setattr(f"{LIMITS}.{limit}", 1)
    torch.testing.assert_close(scores(4), whole, atol=1e-5, rtol=1e-5)


def test_the_softmax_is_global_where_chunks_differ_in_scale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loud = MEANS.clone()
    loud[:, :, 12:] *= 30
    whole = scores(means=loud)
    monkeypatch.setattr(f"{LIMITS}.KEYS_BYTES", 1)
    got = scores(4, means=loud)
    torch.testing.assert_close(got, whole, atol=1e-5, rtol=1e-4)
    assert float(got.sum()) == pytest.approx(LAYERS * QUERY_HEADS * TOKENS, rel=1e-5)


@pytest.mark.parametrize("size", [BLOCKS, 4])
def test_other_blocks_are_never_read(size: int) -> None:
    poisoned, nowhere = MEANS.clone(), DISTANCES.clone()
    poisoned[:, :, ~CANDIDATES] = math.nan
    nowhere[~CANDIDATES] = -7
    got = scores(size, means=poisoned, distances=nowhere)
    assert torch.equal(got, scores(size))


def test_a_tile_without_blocks_or_candidates_changes_nothing() -> None:
    none = torch.zeros_like(CANDIDATES)
    tile, empty = (MEANS, VARIANCES), (MEANS[:, :, :0], VARIANCES[:, :, :0])
    got = rotated_scores(
        QUERIES,
        OFFSETS,
        [empty, tile, tile],
        [none[:0], none, CANDIDATES],
        [DISTANCES[:0], DISTANCES, DISTANCES],
        [TABLE] * LAYERS,
    )
    assert not got[:BLOCKS].any() and torch.equal(got[BLOCKS:], scores())


def test_without_candidates_tiles_or_tokens_there_is_nothing() -> None:
    none = torch.zeros_like(CANDIDATES)
    assert torch.equal(scores(9, candidates=none), torch.zeros(BLOCKS))
    tables = [TABLE] * LAYERS
    assert rotated_scores(QUERIES, OFFSETS, [], [], [], tables).shape == (0,)
    tile = ([(MEANS, VARIANCES)], [CANDIDATES], [DISTANCES], tables)
    nobody = rotated_scores(QUERIES[:, :0], OFFSETS[:0], *tile)
    assert torch.equal(nobody, torch.zeros(BLOCKS))


def test_errors_name_what_was_expected_and_what_came() -> None:
    tables = [TABLE] * LAYERS
    tile, masks, far = [(MEANS, VARIANCES)], [CANDIDATES], [DISTANCES]
    with pytest.raises(ConfigError, match=r"queries has an unsupported dtype.*float16"):
        rotated_scores(QUERIES.half(), OFFSETS, tile, masks, far, tables)
    with pytest.raises(ConfigError, match=r"means has an unsupported dtype.*float64"):
        rotated_scores(
            QUERIES, OFFSETS, [(MEANS.double(), VARIANCES.double())], masks, far, tables
        )
    with pytest.raises(ValueError, match=r"queries must be .*, got \(4, 6, 16\)"):
        rotated_scores(QUERIES[0], OFFSETS, tile, masks, far, tables)
    with pytest.raises(ValueError, match=r"one int64 per token: expected \(4,\) .*got \(3,\)"):
        rotated_scores(QUERIES, OFFSETS[1:], tile, masks, far, tables)
    with pytest.raises(ValueError, match="one table per layer: expected 3, got 2"):
        rotated_scores(QUERIES, OFFSETS, tile, masks, far, tables[1:])
    with pytest.raises(ValueError, match="one mask per tile: expected 1, got 0"):
        rotated_scores(QUERIES, OFFSETS, tile, [], far, tables)
    with pytest.raises(ValueError, match="distances must be given per tile: expected 1, got 2"):
        rotated_scores(QUERIES, OFFSETS, tile, masks, [*far, *far], tables)
    with pytest.raises(ValueError, match="expected a multiple of 2, got 5"):
        rotated_scores(QUERIES[:, :, :5], OFFSETS, tile, masks, far, tables)
    with pytest.raises(ValueError, match=r"and \(3, 2, 23, 6\), got .*\(3, 2, 23, 5\)"):
        rotated_scores(QUERIES, OFFSETS, [(MEANS, VARIANCES[..., 1:])], masks, far, tables)
    with pytest.raises(ValueError, match=r"expected torch.float16, got .* and torch.float32"):
        rotated_scores(QUERIES, OFFSETS, [(MEANS, VARIANCES.float())], masks, far, tables)
    with pytest.raises(ValueError, match=r"distances\[0\] must be one int64 per block"):
        rotated_scores(QUERIES, OFFSETS, tile, masks, [DISTANCES.float()], tables)
    with pytest.raises(ValueError, match="must not be negative: expected at least 0, got -"):
        rotated_scores(QUERIES, OFFSETS, tile, masks, [DISTANCES - 128], tables)
    with pytest.raises(ValueError, match="must lie inside the rotary table"):
        rotated_scores(QUERIES, OFFSETS, tile, masks, [DISTANCES + 128], tables)
