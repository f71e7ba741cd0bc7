"""mean-k is the published rule, whatever the rotation of the keys it is made of."""

from __future__ import annotations

import pytest
import torch

from kvws.recall.index import BlockIndex
from kvws.recall.signals.build import KeyGeometry, enabled_signals
from kvws.recall.signals.enabled import raw_keys
from tests.recall.keys import (
    DIM,
    GROUP,
    KV_HEADS,
    LAYERS,
    QUERY_HEADS,
    RAW,
    TABLES,
    baked,
    seeded,
)

BLOCKS = 7
RAW_KEYS = seeded(1, LAYERS, BLOCKS * 32, KV_HEADS, DIM)
MEANS = RAW_KEYS.double().unflatten(1, (BLOCKS, 32)).mean(dim=2).transpose(0, 1)
QUERIES = seeded(2, LAYERS, 5, QUERY_HEADS, DIM)
EVERY = torch.ones(BLOCKS, dtype=torch.bool)


def published(means: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """Softmax over the candidates per layer, token and query head, summed; fp64."""
    keys = means.repeat_interleave(GROUP, dim=2)
    logits = torch.einsum("lthd,blhd->blth", QUERIES.double(), keys) * DIM**-0.5
    logits[~candidates] = -torch.inf
    return logits.softmax(dim=0).sum(dim=(1, 2, 3)).masked_fill(~candidates, 0)


@pytest.mark.parametrize("kind", TABLES)
def test_a_row_is_the_mean_of_the_keys_without_their_rotation(kind: str) -> None:
    rotary = TABLES[kind]
    signals = enabled_signals(["mean-k"], KeyGeometry(LAYERS, KV_HEADS, DIM), [rotary] * LAYERS)
    first = [0, 320, RAW, 64, 3000, RAW, 32]
    rows = signals.rows(raw_keys(baked(RAW_KEYS, rotary, first)), torch.tensor(first))
    assert rows.shape == (BLOCKS, 2 * LAYERS * KV_HEADS * DIM)
    ((means,),) = signals.parts(rows)
    torch.testing.assert_close(means.double(), MEANS, atol=1e-5, rtol=1e-3)


def test_scores_are_the_published_equation_on_half_precision_means() -> None:
    geometry = KeyGeometry(LAYERS, KV_HEADS, DIM)
    signals = enabled_signals(["mean-k"], geometry, [TABLES["neox"]] * LAYERS)
    rows = signals.rows(raw_keys(RAW_KEYS), torch.full((BLOCKS,), RAW))
    index = BlockIndex(signals)
    index.write(range(BLOCKS), rows)
    candidates = torch.tensor([False, True, True, False, True, True, True])
    scores = index.score(QUERIES, torch.arange(BLOCKS), 0, candidates)["mean-k"]
    expected = published(MEANS.half().double(), candidates)
    torch.testing.assert_close(scores.double(), expected, atol=1e-5, rtol=1e-5)


def test_shares_of_two_ranks_add_up() -> None:
    total = torch.zeros(BLOCKS)
    for rank in range(2):
        geometry = KeyGeometry(LAYERS, 1, DIM, rank, 2)
        signals = enabled_signals(["mean-k"], geometry, [TABLES["neox"]] * LAYERS)
        of_rank = RAW_KEYS[:, :, rank : rank + 1]
        index = BlockIndex(signals)
        index.write(range(BLOCKS), signals.rows(raw_keys(of_rank), torch.full((BLOCKS,), RAW)))
        queries = QUERIES[:, :, GROUP * rank : GROUP * (rank + 1)]
        total += index.score(queries, torch.arange(BLOCKS), 0, EVERY)["mean-k"]
    expected = published(MEANS.half().double(), EVERY)
    torch.testing.assert_close(total.double(), expected, atol=1e-5, rtol=1e-5)
