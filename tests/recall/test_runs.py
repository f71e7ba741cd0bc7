"""Runs of blocks, scored by their mean keys."""

from __future__ import annotations

import pytest
import torch

from kvws.recall import runs as runs_module
from kvws.recall.index import TILE_BLOCKS, BlockIndex
from kvws.recall.profile import ContentKeys
from kvws.recall.shortlist import RUN_BLOCKS
from kvws.recall.signals.build import KeyGeometry, enabled_signals
from kvws.recall.signals.enabled import EnabledSignals, raw_keys
from tests.recall.keys import DIM, KV_HEADS, LAYERS, QUERY_HEADS, RAW, TABLES, profile, seeded

QUERIES = seeded(2, LAYERS, 6, QUERY_HEADS, DIM)
BLOCKS = TILE_BLOCKS + 3 * RUN_BLOCKS + 5
KEYS = seeded(3, LAYERS, 32 * BLOCKS, KV_HEADS, DIM)


def signals(*names: str, content_keys: ContentKeys = "int8") -> EnabledSignals:
    tables, sizes = [TABLES["neox"]] * LAYERS, KeyGeometry(LAYERS, KV_HEADS, DIM)
    return enabled_signals(names, sizes, tables, profile(content_keys=content_keys))


def rows_of(enabled: EnabledSignals, keys: torch.Tensor = KEYS) -> torch.Tensor:
    blocks = keys.shape[1] // 32
    return enabled.rows(raw_keys(keys), torch.full((blocks,), RAW))


def filled(enabled: EnabledSignals, blocks: list[int] | range) -> BlockIndex:
    index = BlockIndex(enabled)
    index.write(blocks, rows_of(enabled)[list(blocks)])
    return index


def expected(blocks: list[int] | range) -> torch.Tensor:
    """Runs as blocks: each has its blocks' mean key 32 times, scored by the signal itself."""
    runs = max(blocks) // RUN_BLOCKS + 1
    by_block = KEYS.unflatten(1, (BLOCKS, 32)).mean(dim=2)
    present = [[b for b in blocks if b // RUN_BLOCKS == run] for run in range(runs)]
    means = [by_block[:, some].mean(1) if some else torch.zeros(LAYERS, KV_HEADS, DIM)
             for some in present]  # fmt: skip
    keys = torch.stack(means, dim=1).repeat_interleave(32, dim=1)
    enabled = signals("content", content_keys="means")
    index = BlockIndex(enabled)
    index.write(range(runs), rows_of(enabled, keys))
    some = torch.tensor([bool(of_run) for of_run in present])
    return index.score(QUERIES, torch.zeros(runs, dtype=torch.int64), 0, some)["content"]


@pytest.mark.parametrize("content_keys", ["int8", "means"])
def test_a_run_is_scored_as_one_block_that_has_its_blocks_mean_key(
    content_keys: ContentKeys,
) -> None:
    index = filled(signals("rotated-mean", "content", content_keys=content_keys), range(BLOCKS))
    found = index.score_runs(QUERIES)
    assert found is not None
    torch.testing.assert_close(
        found[: -(-BLOCKS // RUN_BLOCKS)], expected(range(BLOCKS)), atol=0.03, rtol=0.03
    )


def test_blocks_without_a_row_do_not_count() -> None:
    some = [b for b in range(BLOCKS) if b % 3 and b // RUN_BLOCKS not in (2, 33)]
    found = filled(signals("content"), some).score_runs(QUERIES)
    assert found is not None and found[2] == found[33] == 0
    of_runs = expected(some)
    torch.testing.assert_close(found[: len(of_runs)], of_runs, atol=0.03, rtol=0.03)


def test_rows_written_later_count_from_then_on() -> None:
    enabled = signals("content")
    rows = rows_of(enabled)
    index = BlockIndex(enabled)
    for begin in range(0, BLOCKS, 100):  # a block's run may grow, and be written over
        some = range(begin, min(begin + 100, BLOCKS))
        index.write(some, rows[(some.start + 7) % BLOCKS].expand(len(some), -1))
        assert index.score_runs(QUERIES) is not None
        index.write(some, rows[some.start : some.stop])
    whole = filled(enabled, range(BLOCKS))
    found, wanted = index.score_runs(QUERIES), whole.score_runs(QUERIES)
    assert found is not None and wanted is not None
    count = -(-BLOCKS // RUN_BLOCKS)
    torch.testing.assert_close(found[:count], wanted[:count], atol=1e-4, rtol=1e-4)


def test_rows_of_the_question_that_do_not_count_change_nothing() -> None:
    index = filled(signals("content"), range(64))
    counts = torch.tensor([True, False, True, True, False, False])
    found, wanted = index.score_runs(QUERIES, counts), index.score_runs(QUERIES[:, counts])
    assert found is not None and wanted is not None and torch.equal(found, wanted)


def test_of_a_long_question_some_rows_ask_evenly_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_module, "ASKING_TOKENS", 2)
    index = filled(signals("content"), range(64))
    counts = torch.tensor([True, False, True, True, False, True])
    found, wanted = index.score_runs(QUERIES, counts), index.score_runs(QUERIES[:, [2, 5]])
    assert found is not None and wanted is not None and torch.equal(found, wanted)
    found, wanted = index.score_runs(QUERIES), index.score_runs(QUERIES[:, [2, 5]])
    assert found is not None and wanted is not None and torch.equal(found, wanted)


def test_without_content_heads_runs_cannot_be_told_apart() -> None:
    assert filled(signals("rotated-mean", "mean-k"), range(20)).score_runs(QUERIES) is None
    assert BlockIndex(signals("mean-k")).score_runs(QUERIES) is None


def test_an_empty_index_has_no_runs() -> None:
    found = BlockIndex(signals("content")).score_runs(QUERIES)
    assert found is not None and found.numel() == 0


def test_what_runs_weigh_is_little() -> None:
    index = filled(signals("content"), range(BLOCKS))
    before = index.nbytes
    index.score_runs(QUERIES)
    assert 0 < index.nbytes - before < before / 200
