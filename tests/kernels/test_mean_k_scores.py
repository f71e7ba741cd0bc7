"""The published Mean-K rule, against plain loops in fp64."""

from __future__ import annotations

import math

import pytest
import torch

from kvws.errors import ConfigError
from kvws.kernels.score import mean_k_scores

SEEDS = (0, 1, 2)
LAYERS, TOKENS, QUERY_HEADS, KV_HEADS, HEAD_DIM, BLOCKS = 2, 6, 6, 2, 16, 23


def problem(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, one tile, and candidates: the first and last blocks are masked out."""
    generator = torch.Generator().manual_seed(seed)
    queries = 3 * torch.randn(LAYERS, TOKENS, QUERY_HEADS, HEAD_DIM, generator=generator)
    tile = torch.randn(LAYERS, KV_HEADS, BLOCKS, HEAD_DIM, generator=generator)
    candidates = torch.rand(BLOCKS, generator=generator) < 0.8
    candidates[0] = candidates[-3:] = False
    candidates[1] = True
    return queries, tile, candidates


def oracle(
    queries: torch.Tensor, tile: torch.Tensor, candidates: torch.Tensor, *, grouped: bool = True
) -> torch.Tensor:
    """score(b) = Σ over layers, heads and tokens of softmax over candidates, term by term."""
    layers, tokens, query_heads, head_dim = queries.shape
    kv_heads = tile.shape[1]
    scores = [0.0] * tile.shape[2]
    chosen = [b for b in range(tile.shape[2]) if candidates[b]]
    for layer in range(layers):
        for token in range(tokens):
            for head in range(query_heads):
                kv_head = head // (query_heads // kv_heads) if grouped else head % kv_heads
                q = queries[layer, token, head].double()
                logits = [
                    float(q @ tile[layer, kv_head, b].double()) / math.sqrt(head_dim)
                    for b in chosen
                ]
                total = sum(math.exp(logit) for logit in logits)
                for b, logit in zip(chosen, logits, strict=True):
                    scores[b] += math.exp(logit) / total
    return torch.tensor(scores, dtype=torch.float64)


def worst(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("seed", SEEDS)
def test_the_score_is_the_published_sum(seed: int) -> None:
    queries, tile, candidates = problem(seed)
    got = mean_k_scores(queries, [tile], [candidates])
    assert got.dtype == torch.float32
    assert worst(got, oracle(queries, tile, candidates)) < 1e-5, f"seed {seed}"


@pytest.mark.parametrize("seed", SEEDS)
def test_control_the_oracle_catches_a_wrong_head_mapping(seed: int) -> None:
    queries, tile, candidates = problem(seed)
    got = mean_k_scores(queries, [tile], [candidates])
    assert worst(got, oracle(queries, tile, candidates, grouped=False)) > 1e-2, f"seed {seed}"


def test_query_heads_read_the_kv_head_of_their_group() -> None:
    """Heads 0 to 2 read KV head 0 and heads 3 to 5 KV head 1: each points at its own block."""
    queries = torch.zeros(1, 1, 6, 16)
    queries[..., 0] = 400.0
    tile = torch.zeros(1, 2, 2, 16)
    tile[0, 0, 0, 0] = tile[0, 1, 1, 0] = 1.0
    both = torch.ones(2, dtype=torch.bool)
    assert mean_k_scores(queries, [tile], [both]).tolist() == [3.0, 3.0]
    queries[:, :, 5] = 0.0
    assert mean_k_scores(queries, [tile], [both]).tolist() == [3.5, 2.5]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("cut", [[1], [4], [8], [22], [23]], ids=str)
def test_tiled_is_untiled(cut: list[int], seed: int) -> None:
    queries, tile, candidates = problem(seed)
    whole = mean_k_scores(queries, [tile], [candidates])
    tiles = tile.split(cut[0], dim=2)
    tiled = mean_k_scores(queries, tiles, candidates.split(cut[0]))
    assert worst(tiled, whole.double()) < 1e-5, f"seed {seed}"


def test_the_softmax_is_global_where_tiles_differ_in_scale() -> None:
    """A tile of overwhelming logits leaves the other next to nothing."""
    queries, tile, _ = problem(0)
    every = torch.ones(BLOCKS, dtype=torch.bool)
    loud = torch.cat((tile, 40 * tile.abs().mul(queries[:, :1, :1].sign())), dim=2)
    tiles, masks = loud.split(BLOCKS, dim=2), [every, every]
    got = mean_k_scores(queries, tiles, masks)
    assert worst(got, oracle(queries, loud, every.repeat(2))) < 1e-4


def test_spans_of_query_tokens_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, tile, candidates = problem(0)
    whole = mean_k_scores(queries, [tile], [candidates]).double()
    monkeypatch.setattr("kvws.kernels.score.reference.LOGITS_BYTES", 4 * KV_HEADS * BLOCKS * 2)
    assert worst(mean_k_scores(queries, [tile], [candidates]), whole) < 1e-6
    split = mean_k_scores(queries, tile.split(9, dim=2), candidates.split(9))
    assert worst(split, whole) < 1e-5


@pytest.mark.parametrize("size", [BLOCKS, 8])
def test_other_blocks_score_zero_and_are_never_read(size: int) -> None:
    queries, tile, candidates = problem(0)
    clean = mean_k_scores(queries, [tile], [candidates])
    tile[:, :, ~candidates] = math.nan
    got = mean_k_scores(queries, tile.split(size, dim=2), candidates.split(size))
    assert (got[~candidates] == 0).all()
    assert (got[candidates] > 0).all()
    torch.testing.assert_close(got, clean, rtol=1e-5, atol=1e-6)


def test_all_the_mass_is_shared_out() -> None:
    queries, tile, candidates = problem(0)
    total = float(mean_k_scores(queries, [tile], [candidates]).sum())
    assert total == pytest.approx(LAYERS * QUERY_HEADS * TOKENS, rel=1e-5)


@pytest.mark.parametrize("size", [BLOCKS, 8])
def test_no_candidates_is_zeros(size: int) -> None:
    queries, tile, candidates = problem(0)
    none = torch.zeros_like(candidates)
    got = mean_k_scores(queries, tile.split(size, dim=2), none.split(size))
    assert torch.equal(got, torch.zeros(BLOCKS))


def test_a_tile_without_candidates_changes_nothing() -> None:
    queries, tile, candidates = problem(0)
    none = torch.zeros_like(candidates)
    tiles, masks = [tile, tile, tile[:, :, :0]], [candidates, none, none[:0]]
    got = mean_k_scores(queries, tiles, masks)
    assert torch.equal(got[:BLOCKS], mean_k_scores(queries, [tile], [candidates]))
    assert not got[BLOCKS:].any()


def test_no_tiles_and_no_query_tokens() -> None:
    queries, tile, candidates = problem(0)
    assert mean_k_scores(queries, [], []).shape == (0,)
    assert torch.equal(mean_k_scores(queries[:, :0], [tile], [candidates]), torch.zeros(BLOCKS))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_tiles_are_upcast(dtype: torch.dtype) -> None:
    queries, tile, candidates = problem(0)
    half = tile.to(dtype)
    got = mean_k_scores(queries, [half], [candidates])
    assert torch.equal(got, mean_k_scores(queries, [half.float()], [candidates]))


def test_errors_name_what_was_expected_and_what_came() -> None:
    queries, tile, candidates = problem(0)
    with pytest.raises(ValueError, match=r"queries must be .*, got \(6, 6, 16\)"):
        mean_k_scores(queries[0], [tile], [candidates])
    with pytest.raises(ValueError, match="one mask per tile: expected 1, got 2"):
        mean_k_scores(queries, [tile], [candidates, candidates])
    with pytest.raises(ValueError, match=r"tiles\[0\].*\[2, 2, tile_blocks, 16\], got \(1, 2, 23"):
        mean_k_scores(queries, [tile[:1]], [candidates])
    with pytest.raises(ValueError, match=r"tiles\[1\].*\[2, 2, tile_blocks, 16\], got \(2, 1, 23"):
        mean_k_scores(queries, [tile, tile[:, :1]], [candidates, candidates])
    with pytest.raises(ValueError, match="expected a multiple of 2, got 5"):
        mean_k_scores(queries[:, :, :5], [tile], [candidates])
    with pytest.raises(ValueError, match=r"expected \(23,\) torch.bool, got \(22,\) torch.bool"):
        mean_k_scores(queries, [tile], [candidates[1:]])
    with pytest.raises(ValueError, match=r"expected torch.float32, got torch.float16"):
        mean_k_scores(queries, [tile, tile.half()], [candidates, candidates])
    with pytest.raises(ConfigError, match=r"queries has an unsupported dtype.*got torch.float16"):
        mean_k_scores(queries.half(), [tile], [candidates])
