"""The retrieval index: the same rows whatever the steps, absent rows never score."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kvws.recall import index as index_module
from kvws.recall.index import TILE_BLOCKS, BlockIndex
from kvws.recall.signals.build import SIGNAL_NAMES, KeyGeometry, enabled_signals
from kvws.recall.signals.enabled import EnabledSignals, raw_keys
from tests.recall.keys import (
    DIM,
    KV_HEADS,
    LAYERS,
    QUERY_HEADS,
    RAW,
    TABLES,
    profile,
    seeded,
)

TOKENS = 3
QUERIES = seeded(2, LAYERS, TOKENS, QUERY_HEADS, DIM)


def signals(*names: str) -> EnabledSignals:
    tables = [TABLES["neox"]] * LAYERS
    return enabled_signals(names, KeyGeometry(LAYERS, KV_HEADS, DIM), tables, profile())


def rows_of(blocks: int, enabled: EnabledSignals) -> torch.Tensor:
    keys = seeded(3, LAYERS, 32 * blocks, KV_HEADS, DIM)
    return enabled.rows(raw_keys(keys), torch.full((blocks,), RAW))


def filled(blocks: int, written: Sequence[int] | None = None, *names: str) -> BlockIndex:
    """An index of so many blocks; those of `written` one by one."""
    enabled = signals(*(names or SIGNAL_NAMES))
    rows = rows_of(blocks, enabled)
    index = BlockIndex(enabled)
    for block in written if written is not None else range(blocks):
        index.write([block], rows[block].unsqueeze(0))
    return index


def scores(index: BlockIndex, candidates: torch.Tensor) -> dict[str, torch.Tensor]:
    blocks = candidates.numel()
    return index.score(QUERIES, 32 * torch.arange(blocks), 32 * blocks, candidates)


def test_every_signal_scores_the_candidates_that_are_present_and_no_others() -> None:
    candidates = torch.ones(20, dtype=torch.bool)
    candidates[[0, 19]] = False
    found = scores(filled(20, [b for b in range(20) if b not in (3, 11)]), candidates)
    assert tuple(found) == SIGNAL_NAMES
    wanted = candidates.clone()
    wanted[[3, 11]] = False
    without = scores(filled(20), wanted)
    for name, of_blocks in found.items():
        assert of_blocks.shape == (20,) and of_blocks.dtype == torch.float32
        assert torch.equal(of_blocks.nonzero(), wanted.nonzero())
        torch.testing.assert_close(of_blocks, without[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("blocks", [15, 16, 17, 33])
def test_tiles_do_not_show(monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    wanted = torch.ones(blocks, dtype=torch.bool)
    wanted[blocks // 2] = False
    whole = scores(filled(blocks), wanted)
    monkeypatch.setattr(index_module, "TILE_BLOCKS", 16)
    tiled = filled(blocks)
    assert tiled.rows == blocks
    for name, of_blocks in scores(tiled, wanted).items():
        torch.testing.assert_close(of_blocks, whole[name], atol=1e-5, rtol=1e-5)


def test_a_tile_without_candidates_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = torch.zeros(40, dtype=torch.bool)
    wanted[[1, 5, 35]] = True
    whole = scores(filled(40), wanted)
    monkeypatch.setattr(index_module, "TILE_BLOCKS", 16)
    for name, of_blocks in scores(filled(40), wanted).items():
        torch.testing.assert_close(of_blocks, whole[name], atol=1e-5, rtol=1e-5)


def test_rows_are_read_as_they_were_written_whatever_order_they_came_in() -> None:
    rows = rows_of(40, signals(*SIGNAL_NAMES))
    for index in (filled(40), filled(40, [*range(30, 40), *range(30)])):
        for block in range(40):
            read = index.read(block)
            assert read is not None and torch.equal(read, rows[block])


def test_stretches_across_tiles_and_gaps_are_written_like_single_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(index_module, "TILE_BLOCKS", 16)
    enabled = signals(*SIGNAL_NAMES)
    rows = rows_of(30, enabled)
    index = BlockIndex(enabled)
    blocks = [3, 4, *range(6, 20), 22, 29]
    index.write(blocks, rows[blocks])
    assert index.rows == len(blocks)
    for block in range(30):
        read = index.read(block)
        assert (block in index) == (block in blocks)
        assert read is None if block not in blocks else torch.equal(read, rows[block])  # type: ignore[arg-type]


def test_a_row_is_absent_until_it_is_written() -> None:
    index = filled(2, [1])
    assert index.rows == 1 and 1 in index and 0 not in index
    assert index.read(0) is None and index.read(2) is None
    assert index.read(10 * TILE_BLOCKS) is None
    found = scores(index, torch.ones(2, dtype=torch.bool))["mean-k"]
    assert float(found[0]) == 0.0
    assert float(found[1]) == pytest.approx(LAYERS * TOKENS * QUERY_HEADS)


def test_a_row_can_be_written_again() -> None:
    index = filled(2)
    other = rows_of(2, signals(*SIGNAL_NAMES))[1]
    index.write([0], other.unsqueeze(0))
    read = index.read(0)
    assert read is not None and torch.equal(read, other) and index.rows == 2


def test_candidates_beyond_the_last_tile_score_nothing() -> None:
    blocks = TILE_BLOCKS + 5
    for of_blocks in scores(filled(2), torch.ones(blocks, dtype=torch.bool)).values():
        assert of_blocks.shape == (blocks,) and not of_blocks[2:].any()


@pytest.mark.parametrize("blocks", [0, 3])
def test_an_empty_index_scores_nothing(blocks: int) -> None:
    index = BlockIndex(signals(*SIGNAL_NAMES))
    found = scores(index, torch.ones(blocks, dtype=torch.bool))
    assert tuple(found) == SIGNAL_NAMES
    assert all(s.shape == (blocks,) and not s.any() for s in found.values())
    assert index.nbytes == 0


def test_no_candidate_and_no_query_score_nothing() -> None:
    index = filled(3)
    assert not any(s.any() for s in scores(index, torch.zeros(3, dtype=torch.bool)).values())
    every = torch.ones(3, dtype=torch.bool)
    for of_blocks in index.score(QUERIES[:, :0], torch.arange(3), 96, every).values():
        assert of_blocks.shape == (3,) and not of_blocks.any()


def test_the_index_grows_by_tiles_of_what_its_signals_need() -> None:
    for names in (("mean-k",), SIGNAL_NAMES):
        enabled = signals(*names)
        index = filled(1, None, *names)
        assert index.nbytes == TILE_BLOCKS * enabled.row_bytes
        index.write([2 * TILE_BLOCKS], rows_of(1, enabled))
        assert index.nbytes == 3 * TILE_BLOCKS * enabled.row_bytes


def test_without_signals_it_only_knows_which_blocks_there_are() -> None:
    nothing = enabled_signals(
        [], KeyGeometry(LAYERS, KV_HEADS, DIM), [TABLES["neox"]] * LAYERS
    )
    index = BlockIndex(nothing)
    index.write([4], torch.zeros(1, nothing.row_bytes, dtype=torch.uint8))
    assert 4 in index and index.rows == 1 and index.nbytes == 0
    assert scores(index, torch.ones(5, dtype=torch.bool)) == {}
