"""content finds the block with the token that a calibrated head looks for."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvws.kernels.token_scores import decode
from kvws.recall.index import BlockIndex
from kvws.recall.profile import ContentKeys
from kvws.recall.signals.content import Content
from kvws.recall.signals.content_keys import content_parts, encode
from kvws.recall.signals.enabled import EnabledSignals, raw_keys
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

BLOCKS, TOKENS = 9, 5
HEADS = ((1, 0), (1, 1), (1, 3), (2, 2))
RAW_KEYS = seeded(1, LAYERS, BLOCKS * 32, KV_HEADS, DIM)
QUERIES = seeded(2, LAYERS, TOKENS, QUERY_HEADS, DIM)
EVERY = torch.ones(BLOCKS, dtype=torch.bool)
ANYWHERE = torch.zeros(BLOCKS, dtype=torch.int64)
PRECISIONS: tuple[ContentKeys, ...] = get_args(ContentKeys)


def made(
    precision: ContentKeys = "int8",
    *,
    heads: tuple[tuple[int, int], ...] = HEADS,
    keys: torch.Tensor = RAW_KEYS,
) -> BlockIndex:
    tables = [TABLES["neox"]] * LAYERS
    signal = Content(heads, group=GROUP, head_dim=DIM, precision=precision)
    signals = EnabledSignals([signal], tables)
    rows = signals.rows(raw_keys(keys), torch.full((keys.shape[1] // 32,), RAW))
    index = BlockIndex(signals)
    index.write(range(len(rows)), rows)
    return index


def score(
    index: BlockIndex, candidates: torch.Tensor = EVERY, rows: torch.Tensor | None = None
) -> torch.Tensor:
    return index.score(QUERIES, ANYWHERE, 0, candidates, rows)["content"]


def slow(
    precision: ContentKeys, candidates: torch.Tensor, counted: list[int] | None = None
) -> torch.Tensor:
    """The rule in plain loops, on keys as they come back from their codes; fp64."""
    wanted = candidates.nonzero().flatten().tolist()
    total = [0.0] * BLOCKS
    for layer, head in HEADS:
        of_head = RAW_KEYS[layer, :, head // GROUP].unflatten(0, (BLOCKS, 32))
        stored = encode(precision, of_head.unsqueeze(1))
        keys = decode(precision, tuple(part[:, 0] for part in stored)).double()
        best = dict.fromkeys(wanted, -math.inf)
        for t in counted if counted is not None else range(TOKENS):
            q = QUERIES[layer, t, head].double()
            logits = [max(float(q @ key) for key in keys[block]) for block in wanted]
            mean = sum(logits) / len(logits)
            deviation = math.sqrt(sum((x - mean) ** 2 for x in logits) / len(logits))
            for block, logit in zip(wanted, logits, strict=True):
                best[block] = max(best[block], (logit - mean) / deviation if deviation else 0.0)
        for block in wanted:
            total[block] += best[block]
    return torch.tensor(total, dtype=torch.float64)


# ---- keys at rest ----------------------------------------------------------------------------


@given(seed=st.integers(0, 10**6), size=st.sampled_from([1e-3, 1.0, 300.0, 3e4]))
@pytest.mark.parametrize(("precision", "largest"), [("int4", 7), ("int8", 127)])
def test_a_key_comes_back_within_half_a_step(
    precision: ContentKeys, largest: int, seed: int, size: float
) -> None:
    keys = size * seeded(seed, 3, 2, 32, DIM)
    parts = encode(precision, keys)
    for part, shape in zip(parts, content_parts(precision, 2, DIM), strict=True):
        assert part.dtype == shape.dtype and part.shape == (3, *shape.before, *shape.after)
    for head in range(2):
        back = decode(precision, tuple(part[:, head] for part in parts))
        step = keys[:, head].abs().amax(dim=2, keepdim=True) / largest
        # Half a step, and what rounding the step to half precision adds to each of its codes.
        allowed = 0.5 * step + largest * (step * 2**-11 + 6e-8)
        assert bool(((back - keys[:, head]).abs() <= allowed * 1.001).all())


@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_codes_are_symmetric_and_zero_is_exact(precision: ContentKeys) -> None:
    keys = seeded(3, 2, 1, 32, DIM)
    keys[0, 0, 4] = 0.0
    there = decode(precision, tuple(part[:, 0] for part in encode(precision, keys)))
    mirrored = decode(precision, tuple(part[:, 0] for part in encode(precision, -keys)))
    assert torch.equal(there, -mirrored) and not there[0, 4].any()


@pytest.mark.parametrize(
    ("precision", "row_bytes"), [("int4", 32 * (2 + 4)), ("int8", 32 * (2 + 8)), ("means", 16)]
)
def test_a_row_holds_each_kv_head_once(precision: ContentKeys, row_bytes: int) -> None:
    signal = Content(HEADS, group=GROUP, head_dim=DIM, precision=precision)
    assert sum(part.row_bytes for part in signal.parts) == 3 * row_bytes  # 1/0, 1/1, 2/1


@pytest.mark.parametrize("kind", TABLES)
def test_rows_do_not_depend_on_where_keys_were_computed(kind: str) -> None:
    rotary = TABLES[kind]
    signal = Content(HEADS, group=GROUP, head_dim=DIM, precision="int8")
    signals = EnabledSignals([signal], [rotary] * LAYERS)
    first = [0, 320, RAW, 64, 3000, RAW, 32, 96, 128]
    moved = signals.rows(raw_keys(baked(RAW_KEYS, rotary, first)), torch.tensor(first))
    raw = signals.rows(raw_keys(RAW_KEYS), torch.full((BLOCKS,), RAW))
    ((moved_scales, moved_codes),), ((scales, codes),) = signals.parts(moved), signals.parts(raw)
    torch.testing.assert_close(moved_scales.float(), scales.float(), atol=0, rtol=2e-3)
    assert (moved_codes.int() - codes.int()).abs().max() <= 1


# ---- scores ----------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
def test_scores_follow_the_rule(precision: ContentKeys) -> None:
    candidates = torch.tensor([True, True, False, True, True, True, True, False, True])
    scores = score(made(precision), candidates)
    torch.testing.assert_close(
        scores.double(), slow(precision, candidates), atol=1e-4, rtol=1e-4
    )
    assert scores[~candidates].count_nonzero() == 0


def test_only_rows_of_content_are_asked() -> None:
    rows = torch.tensor([False, True, False, True, False])
    expected = slow("int8", EVERY, counted=[1, 3])
    torch.testing.assert_close(
        score(made(), rows=rows).double(), expected, atol=1e-4, rtol=1e-4
    )
    nothing = score(made(), rows=torch.zeros(TOKENS, dtype=torch.bool))
    assert nothing.shape == (BLOCKS,) and not nothing.any()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_pieces_that_fit_memory_do_not_show(
    monkeypatch: pytest.MonkeyPatch, precision: ContentKeys
) -> None:
    index = made(precision)
    whole = score(index)
    monkeypatch.setattr("kvws.kernels.token_scores.api.LOGITS_BYTES", 1)
    monkeypatch.setattr("kvws.kernels.token_scores.reference.TOKEN_LOGITS_BYTES", 1)
    torch.testing.assert_close(score(index), whole, atol=1e-5, rtol=1e-5)


def test_the_block_that_holds_the_key_stands_out() -> None:
    keys = RAW_KEYS.clone()
    keys[1, 5 * 32 + 17, 0] = 5 * QUERIES[1, 3, 0]
    scores = score(made("int4", heads=((1, 0),), keys=keys))
    assert int(scores.argmax()) == 5 and float(scores[5]) > 2.0


def test_blocks_that_are_all_equal_score_nothing() -> None:
    keys = RAW_KEYS[:, :32].repeat(1, BLOCKS, 1, 1)
    assert not score(made(keys=keys)).any()
    one = torch.zeros(BLOCKS, dtype=torch.bool)
    one[3] = True
    assert not score(made(), one).any()


def test_a_rank_without_heads_scores_nothing() -> None:
    index = made(heads=())
    assert index.nbytes == 0 and index.rows == BLOCKS
    assert not score(index).any()


def test_shares_of_two_ranks_add_up() -> None:
    whole = score(made())
    shares = torch.zeros(BLOCKS)
    for rank in range(KV_HEADS):
        first = GROUP * rank
        heads = tuple((at, h - first) for at, h in HEADS if first <= h < first + GROUP)
        index = made(heads=heads, keys=RAW_KEYS[:, :, rank : rank + 1])
        queries = QUERIES[:, :, first : first + GROUP]
        shares += index.score(queries, ANYWHERE, 0, EVERY)["content"]
    torch.testing.assert_close(shares, whole, atol=1e-5, rtol=1e-5)
