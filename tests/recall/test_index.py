"""The Mean-K index: the same rows whatever the steps, absent rows never score."""

from __future__ import annotations

import pytest
import torch

from kvws.recall import index as index_module
from kvws.recall.index import TILE_BLOCKS, MeanKIndex

LAYERS, KV_HEADS, QUERY_HEADS, DIM = 2, 2, 4, 8


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(3)


def filled(rows: torch.Tensor, blocks: list[int] | None = None) -> MeanKIndex:
    """An index with rows [blocks, layers, kv_heads, dim], those of `blocks` written."""
    index = MeanKIndex(LAYERS, KV_HEADS, DIM)
    for block in blocks if blocks is not None else range(len(rows)):
        index.write([block], rows[block].unsqueeze(0))
    return index


def expected_scores(
    queries: torch.Tensor, rows: torch.Tensor, wanted: torch.Tensor
) -> torch.Tensor:
    """Softmax over the wanted blocks per layer, token and query head, in fp64, summed."""
    keys = rows.double().repeat_interleave(QUERY_HEADS // KV_HEADS, dim=2)
    logits = torch.einsum("lthd,blhd->blth", queries.double(), keys) * DIM**-0.5
    logits[~wanted] = -torch.inf
    return logits.softmax(dim=0).sum(dim=(1, 2, 3)).masked_fill(~wanted, 0)


def test_scores_are_a_softmax_over_candidates_that_are_present() -> None:
    rows = torch.randn(20, LAYERS, KV_HEADS, DIM)
    queries = torch.randn(LAYERS, 5, QUERY_HEADS, DIM)
    present = [b for b in range(20) if b not in (3, 11)]
    candidates = torch.ones(20, dtype=torch.bool)
    candidates[[0, 19]] = False
    wanted = candidates.clone()
    wanted[[3, 11]] = False
    scores = filled(rows, present).score(queries, candidates)
    torch.testing.assert_close(
        scores, expected_scores(queries, rows, wanted).float(), atol=1e-5, rtol=1e-5
    )
    assert float(scores[3]) == float(scores[11]) == float(scores[0]) == 0.0


@pytest.mark.parametrize("blocks", [15, 16, 17, 33])
def test_tiles_do_not_show(monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    rows = torch.randn(blocks, LAYERS, KV_HEADS, DIM)
    queries = torch.randn(LAYERS, 3, QUERY_HEADS, DIM)
    wanted = torch.ones(blocks, dtype=torch.bool)
    whole = filled(rows).score(queries, wanted)
    monkeypatch.setattr(index_module, "TILE_BLOCKS", 16)
    tiled = filled(rows)
    torch.testing.assert_close(tiled.score(queries, wanted), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        whole, expected_scores(queries, rows, wanted).float(), atol=1e-5, rtol=1e-5
    )
    assert tiled.rows == blocks


def test_rows_are_the_same_whatever_order_they_came_in() -> None:
    rows = torch.randn(40, LAYERS, KV_HEADS, DIM)
    cold = filled(rows)
    steps = filled(rows, [*range(30, 40), *range(30)])
    for block in range(40):
        a, b = cold.read(block), steps.read(block)
        assert a is not None and b is not None and torch.equal(a, b)


def test_a_row_is_absent_until_it_is_written() -> None:
    rows = torch.randn(2, LAYERS, KV_HEADS, DIM)
    index = filled(rows, [1])
    assert index.rows == 1
    assert index.read(0) is None and index.read(2) is None
    assert index.read(10 * TILE_BLOCKS) is None
    scores = index.score(torch.randn(LAYERS, 1, QUERY_HEADS, DIM), torch.ones(2, dtype=torch.bool))
    assert float(scores[0]) == 0.0 and float(scores[1]) == pytest.approx(LAYERS * QUERY_HEADS)


def test_a_row_can_be_written_again() -> None:
    rows = torch.randn(2, LAYERS, KV_HEADS, DIM)
    index = filled(rows)
    index.write([0], rows[1].unsqueeze(0))
    read = index.read(0)
    assert read is not None and torch.equal(read, rows[1]) and index.rows == 2


def test_candidates_beyond_the_last_tile_score_nothing() -> None:
    index = filled(torch.randn(2, LAYERS, KV_HEADS, DIM))
    blocks = TILE_BLOCKS + 5
    queries = torch.randn(LAYERS, 1, QUERY_HEADS, DIM)
    scores = index.score(queries, torch.ones(blocks, dtype=torch.bool))
    assert scores.shape == (blocks,) and not scores[2:].any()


@pytest.mark.parametrize("blocks", [0, 3])
def test_an_empty_index_scores_nothing(blocks: int) -> None:
    index = MeanKIndex(LAYERS, KV_HEADS, DIM)
    queries = torch.randn(LAYERS, 1, QUERY_HEADS, DIM)
    scores = index.score(queries, torch.ones(blocks, dtype=torch.bool))
    assert scores.shape == (blocks,) and not scores.any()
    assert index.nbytes == 0


def test_no_candidate_scores_nothing() -> None:
    index = filled(torch.randn(3, LAYERS, KV_HEADS, DIM))
    queries = torch.randn(LAYERS, 1, QUERY_HEADS, DIM)
    assert not index.score(queries, torch.zeros(3, dtype=torch.bool)).any()


def test_the_index_grows_by_tiles() -> None:
    index = filled(torch.randn(1, LAYERS, KV_HEADS, DIM))
    tile_bytes = LAYERS * KV_HEADS * TILE_BLOCKS * DIM * 4
    assert index.nbytes == tile_bytes
    index.write([2 * TILE_BLOCKS], torch.zeros(1, LAYERS, KV_HEADS, DIM))
    assert index.nbytes == 3 * tile_bytes
