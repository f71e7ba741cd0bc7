"""What exact scoring is measured against."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvws.bench import score
from kvws.bench.scale_index import profile_of
from kvws.bench.score import ARMS, ScoreCost, measure_score, score_table
from kvws.bench.score_work import multiplications
from kvws.models import read_model_config
from kvws.models.geometry import ModelGeometry, RopeParameters
from kvws.recall.profile import ContentKeys, Profile

GEOMETRY = ModelGeometry(
    architecture="Tiny",
    layers=4,
    query_heads=6,
    kv_heads=2,
    head_dim=16,
    max_position=2048,
    vocab=100,
    rope=RopeParameters(10_000.0, "default", 8),
)
PROFILE = Profile(
    model="tiny",
    layers=4,
    query_heads=6,
    kv_heads=2,
    head_dim=16,
    content_heads=((1, 0), (1, 2), (3, 5)),
    rotated_layers=(0, 2),
    content_keys="int8",
)
COST = ScoreCost(
    signals="auto",
    blocks=100,
    query_tokens=1,
    index_bytes=1000,
    operations=2000,
    clock_ms=10.0,
    cpu_ms=8.0,
    read_ms=2.0,
    copy_ms=4.0,
    multiply_ms=1.0,
    of_read=0.25,
    of_multiply=0.125,
    extra_bytes=None,
)


@pytest.mark.parametrize(
    ("name", "operations"),
    [
        ("mean-k", 2 * 4 * 6 * 5 * 10 * 16),  # layers, query heads, tokens, blocks, head_dim
        ("rotated-mean", 2 * 2 * 6 * 5 * 10 * (16 + 4)),  # and a variance for each of 4 pairs
        ("content", 2 * 3 * 5 * 10 * 32 * 16),  # content heads, tokens, blocks, their tokens
    ],
)
def test_operations_are_those_of_the_definition(name: str, operations: int) -> None:
    (work,) = multiplications([name], GEOMETRY, PROFILE, blocks=10, query_tokens=5)
    assert work.operations == operations


@pytest.mark.parametrize(("keys", "of_block"), [("int4", 32), ("int8", 32), ("means", 1)])
def test_content_multiplies_every_token_or_only_a_mean(keys: ContentKeys, of_block: int) -> None:
    profile = replace(PROFILE, content_keys=keys)
    (work,) = multiplications(["content"], GEOMETRY, profile, blocks=10, query_tokens=5)
    assert work.operations == 2 * 3 * 5 * 10 * of_block * 16


def test_products_have_the_rows_of_a_gqa_group_and_the_columns_of_a_piece() -> None:
    (work,) = multiplications(["mean-k"], GEOMETRY, PROFILE, blocks=10, query_tokens=5)
    assert work.shape == (3 * 5, 16, 512)


@pytest.mark.parametrize("query_tokens", [1, 5, 128, 4096])
def test_keys_and_products_of_content_stay_in_a_cores_cache(query_tokens: int) -> None:
    (work,) = multiplications(
        ["content"], GEOMETRY, PROFILE, blocks=10**6, query_tokens=query_tokens
    )
    queries, head_dim, keys = work.shape
    assert queries == 3 * query_tokens // 2 and head_dim == 16  # three heads share two KV heads
    assert 1 <= keys <= 512 * 32 and keys * (queries + head_dim) <= 1 << 18


def test_the_limit_that_takes_longer_binds() -> None:
    assert (COST.binds, COST.of_limit) == ("read", 0.25)
    slow = replace(COST, of_multiply=0.5)
    assert (slow.binds, slow.of_limit) == ("multiply", 0.5)


def test_figures_for_a_file_say_what_binds() -> None:
    figures = COST.as_json()
    assert figures["binds"] == "read" and figures["of_limit"] == 0.25
    assert figures["query_tokens"] == 1 and figures["extra_bytes"] is None


def test_every_set_of_signals_is_measured_with_every_query(smollm2: Path) -> None:
    said: list[str] = []
    costs = measure_score(
        read_model_config(smollm2),
        profile_of(smollm2),
        blocks=600,
        query_tokens=(2, 1),
        repetitions=1,
        progress=said.append,
    )
    assert [(c.signals, c.query_tokens) for c in costs] == [(a, n) for a in ARMS for n in (2, 1)]
    weight = {cost.signals: cost.index_bytes for cost in costs}
    assert weight["mean-k"] == 600 * 30 * 3 * 64 * 2
    assert weight["auto"] == weight["rotated-mean"] + weight["content"]
    for cost in costs:
        times = (cost.clock_ms, cost.cpu_ms, cost.read_ms, cost.copy_ms, cost.multiply_ms)
        assert min(times) > 0 and min(cost.of_read, cost.of_multiply) > 0
    assert {c.operations for c in costs if c.signals == "mean-k"} == {
        2 * 30 * 9 * 64 * 600 * tokens for tokens in (1, 2)
    }
    assert score_table(costs, 32 * 600).row_count == len(costs)
    assert sum("index" in line for line in said) == len(ARMS)


def test_an_index_that_memory_does_not_allow_is_left_out_with_a_line(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score, "free_bytes", lambda: 3 << 30)
    said: list[str] = []
    costs = measure_score(
        read_model_config(smollm2),
        profile_of(smollm2),
        blocks=1_000_000,
        query_tokens=(1,),
        progress=said.append,
    )
    assert costs == [] and len(said) == len(ARMS)
    assert said[0] == "left out: mean-k has an index of 11.5 GB, 3.2 GB are free"
