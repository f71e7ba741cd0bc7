"""rotated-mean scores blocks as attention would see them at their distance."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from kvws.kernels.rotary import RotaryTable
from kvws.recall.index import BlockIndex
from kvws.recall.signals.enabled import EnabledSignals, raw_keys
from kvws.recall.signals.rotated_mean import RotatedMean
from kvws.recall.signals.signal import asking_tokens
from tests.recall.keys import (
    DIM,
    GROUP,
    KV_HEADS,
    LAYERS,
    QUERY_HEADS,
    RAW,
    TABLES,
    baked,
    complex_pairs,
    seeded,
    turned,
)

BLOCKS, TOKENS, CAP = 9, 5, 192
CHOSEN = (1, 3)
RAW_KEYS = seeded(1, LAYERS, BLOCKS * 32, KV_HEADS, DIM)
QUERIES = seeded(2, LAYERS, TOKENS, QUERY_HEADS, DIM)
FIRST = torch.tensor([0, 32, 64, 96, 192, 320, 352, 288, 2000])
QUERY_FIRST = 320
EVERY = torch.ones(BLOCKS, dtype=torch.bool)
OFFSETS = torch.arange(32)


def made(
    rotary: RotaryTable,
    keys: torch.Tensor = RAW_KEYS,
    *,
    cap_tokens: int = CAP,
    most_asking: int = TOKENS,
) -> tuple[BlockIndex, EnabledSignals]:
    """An index of raw keys."""
    tables = [rotary] * LAYERS
    signal = RotatedMean(
        CHOSEN, keys.shape[2], DIM, tables, cap_tokens=cap_tokens, most_asking=most_asking
    )
    signals = EnabledSignals([signal], tables)
    index = BlockIndex(signals)
    blocks = keys.shape[1] // 32
    index.write(range(blocks), signals.rows(raw_keys(keys), torch.full((blocks,), RAW)))
    return index, signals


def score(index: BlockIndex, candidates: torch.Tensor = EVERY) -> torch.Tensor:
    return index.score(QUERIES, FIRST, QUERY_FIRST, candidates)["rotated-mean"]


def slow(
    index: BlockIndex,
    signals: EnabledSignals,
    rotary: RotaryTable,
    candidates: torch.Tensor,
    counted: Sequence[int] = range(TOKENS),
) -> torch.Tensor:
    """The rule, one pair at a time, on the rows of the index; fp64."""
    z = torch.complex(rotary.cos.double(), rotary.sin.double())
    rows = torch.stack([row for b in range(BLOCKS) if (row := index.read(b)) is not None])
    ((means, variances),) = signals.parts(rows)
    total = torch.zeros(BLOCKS, dtype=torch.float64)
    for place, layer in enumerate(CHOSEN):
        for head in range(QUERY_HEADS):
            for t in counted:
                logits = torch.full((BLOCKS,), -torch.inf, dtype=torch.float64)
                q = QUERIES[layer, t, head]
                q_pairs = complex_pairs(q, rotary) * z[t]
                for b in range(BLOCKS):
                    if not candidates[b]:
                        continue
                    mean = means[b, place, head // GROUP]
                    distance = min(max(QUERY_FIRST - int(FIRST[b]), 32), CAP)
                    shift = (z[distance] / z[distance].abs()).conj()
                    far = complex_pairs(mean, rotary) * shift
                    exact = float((q_pairs * far.conj()).real.sum())
                    beyond = slice(rotary.rotary_dim, None)
                    exact += float(q[beyond].double() @ mean[beyond].double())
                    spread = q_pairs.abs().square() * variances[b, place, head // GROUP].double()
                    logits[b] = exact / math.sqrt(DIM) + 0.25 * float(spread.sum()) / DIM
                total += logits.softmax(dim=0)
    return total


@pytest.mark.parametrize("kind", TABLES)
def test_a_row_is_mean_and_spread_of_the_keys_at_their_offsets(kind: str) -> None:
    rotary = TABLES[kind]
    _, signals = made(rotary)
    first = [0, 320, RAW, 64, 3000, RAW, 32, 96, 128]
    rows = signals.rows(raw_keys(baked(RAW_KEYS, rotary, first)), torch.tensor(first))
    pairs = rotary.rotary_dim // 2
    assert rows.shape == (BLOCKS, 2 * len(CHOSEN) * KV_HEADS * (DIM + pairs))
    ((means, variances),) = signals.parts(rows)
    for place, layer in enumerate(CHOSEN):
        for block in range(BLOCKS):
            at_offsets = turned(RAW_KEYS[layer].split(32)[block], rotary, OFFSETS)
            mean = at_offsets.mean(dim=0)
            around = complex_pairs(at_offsets, rotary) - complex_pairs(mean, rotary)
            spread = around.abs().square().mean(dim=0)
            torch.testing.assert_close(
                means[block, place].double(), mean, atol=1e-4, rtol=1e-3
            )
            torch.testing.assert_close(
                variances[block, place].double(), spread, atol=1e-4, rtol=1e-3
            )


@pytest.mark.parametrize("kind", TABLES)
def test_scores_follow_the_rule(kind: str) -> None:
    rotary = TABLES[kind]
    index, signals = made(rotary)
    candidates = torch.tensor([True, True, False, True, True, True, True, False, True])
    expected = slow(index, signals, rotary, candidates)
    scores = score(index, candidates)
    torch.testing.assert_close(scores.double(), expected, atol=1e-4, rtol=1e-4)
    assert scores[~candidates].count_nonzero() == 0
    assert float(scores.sum()) == pytest.approx(len(CHOSEN) * QUERY_HEADS * TOKENS, rel=1e-5)


@pytest.mark.parametrize("kind", TABLES)
def test_the_mean_is_that_of_the_true_logits_wherever_the_block_was_computed(kind: str) -> None:
    """Two blocks, one query token and head: the ratio of their scores is that of the exponents."""
    rotary = TABLES[kind]
    keys = 0.5 * seeded(5, LAYERS, 64, 1, DIM)
    tables = [rotary] * LAYERS
    signals = EnabledSignals([RotatedMean([2], 1, DIM, tables)], tables)
    at = [3200, 96]
    index = BlockIndex(signals)
    index.write([0, 1], signals.rows(raw_keys(baked(keys, rotary, at)), torch.tensor(at)))
    line = torch.tensor([224, 640])
    query = seeded(6, LAYERS, 1, 1, DIM)
    scores = index.score(query, line, 1000, torch.ones(2, dtype=torch.bool))["rotated-mean"]
    rows = torch.stack([row for b in (0, 1) if (row := index.read(b)) is not None])
    ((_, variances),) = signals.parts(rows)
    q = turned(query[2], rotary, torch.tensor([1000]))[0, 0]
    exponents: list[float] = []
    for block in (0, 1):
        true = turned(keys[2].split(32)[block], rotary, int(line[block]) + OFFSETS)[:, 0]
        energy = complex_pairs(q, rotary).abs().square()
        bonus = 0.25 * float((energy * variances[block, 0, 0].double()).sum()) / DIM
        exponents.append(float((true @ q).mean()) / math.sqrt(DIM) + bonus)
    found = math.log(float(scores[0]) / float(scores[1]))
    assert found == pytest.approx(exponents[0] - exponents[1], abs=2e-3)


def test_blocks_beyond_the_cap_are_as_far_as_it_and_those_of_other_lines_a_block_away() -> None:
    keys = RAW_KEYS[:, :32].repeat(1, BLOCKS, 1, 1)
    index, _ = made(TABLES["neox"], keys)
    scores = score(index)
    assert scores[0] == scores[1] == scores[2] == scores[3], "320 - 96 is beyond 192"
    assert scores[5] == scores[6] == scores[7] == scores[8], "at the query, behind it, near it"
    assert len(set(scores.tolist())) == 3


def test_few_tokens_of_a_long_query_count_evenly_spread() -> None:
    rotary = TABLES["neox"]
    index, signals = made(rotary, most_asking=2)
    expected = slow(index, signals, rotary, EVERY, counted=(1, 4))
    torch.testing.assert_close(score(index).double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("tokens", "asking"),
    [(0, []), (1, [0]), (4, [0, 1, 2, 3]), (5, [0, 2, 4]), (8, [1, 3, 5, 7]), (9, [2, 5, 8])],
)
def test_the_tokens_that_count_are_as_far_apart_as_each_other_up_to_the_last(
    tokens: int, asking: list[int]
) -> None:
    assert list(asking_tokens(tokens, most=4)) == asking


def test_pieces_that_fit_memory_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    index, _ = made(TABLES["interleaved"])
    whole = score(index)
    for limit in ("LOGITS_BYTES", "ROWS_MIN", "COPIES_BYTES"):
        monkeypatch.setattr(f"kvws.kernels.rotated_scores.reference.{limit}", 1)
    torch.testing.assert_close(score(index), whole, atol=1e-5, rtol=1e-5)


def test_a_table_shorter_than_the_cap_is_no_obstacle() -> None:
    long = TABLES["neox"]
    short = RotaryTable(long.cos[:100], long.sin[:100], interleaved=False)
    index, _ = made(short)
    expected, _ = made(long, cap_tokens=99)
    assert torch.equal(score(index), score(expected))


def test_keys_beyond_half_precision_still_score() -> None:
    index, _ = made(TABLES["neox"], 1e5 * RAW_KEYS)
    scores = score(index)
    assert bool(scores.isfinite().all()) and float(scores.sum()) > 0


def test_shares_of_two_ranks_add_up() -> None:
    whole = score(made(TABLES["partial"])[0])
    shares = torch.zeros(BLOCKS)
    for rank in range(KV_HEADS):
        index, _ = made(TABLES["partial"], RAW_KEYS[:, :, rank : rank + 1])
        queries = QUERIES[:, :, GROUP * rank : GROUP * (rank + 1)]
        shares += index.score(queries, FIRST, QUERY_FIRST, EVERY)["rotated-mean"]
    torch.testing.assert_close(shares, whole, atol=1e-5, rtol=1e-5)


def test_layers_may_rotate_differently() -> None:
    """Each layer reads its own table."""
    tables = [TABLES["neox"], TABLES["interleaved"], TABLES["neox"], TABLES["attention factor"]]
    alone = torch.zeros(BLOCKS)
    for layers in ([1], [3], [1, 3]):
        signals = EnabledSignals([RotatedMean(layers, KV_HEADS, DIM, tables)], tables)
        index = BlockIndex(signals)
        rows = signals.rows(raw_keys(RAW_KEYS), torch.full((BLOCKS,), RAW))
        index.write(range(BLOCKS), rows)
        if len(layers) == 1:
            alone += score(index)
        else:
            torch.testing.assert_close(score(index), alone, atol=1e-5, rtol=1e-5)
