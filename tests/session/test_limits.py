"""Sizes that contradict each other are refused with a way out."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvws.errors import ConfigError
from kvws.limits import Limits

GOOD = Limits(
    budget_tokens=1024, reserve_tokens=512, sink_tokens=64, recent_tokens=256, query_tokens=128
)


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"budget_tokens": 320}, "does not hold sink", "--budget to 352"),
        ({"sink_tokens": 0}, "at least one block", "--sink and --recent to 32"),
        ({"recent_tokens": -1}, "at least one block", "--sink and --recent to 32"),
        ({"reserve_tokens": 255}, "does not hold a query of 128", "--reserve to 256"),
        ({"query_tokens": 31}, "a query of 31 tokens is less", "--query to 32"),
        ({"query_tokens": 257}, "does not hold a query of 257", "--reserve to 514"),
    ],
)
def test_a_contradiction_is_a_configuration_error(
    changes: dict[str, int], message: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        dataclasses.replace(GOOD, **changes)
    assert hint in refused.value.hint


def test_the_smallest_sizes_are_accepted() -> None:
    smallest = Limits(
        budget_tokens=96, reserve_tokens=64, sink_tokens=1, recent_tokens=1, query_tokens=32
    )
    assert (smallest.sink_blocks, smallest.recent_blocks, smallest.budget_blocks) == (1, 1, 3)
    assert smallest.chunk_tokens == 32
    assert smallest.context_tokens == 160


def test_the_hinted_values_are_accepted() -> None:
    dataclasses.replace(GOOD, budget_tokens=352)
    dataclasses.replace(GOOD, query_tokens=257, reserve_tokens=514)


LIMITS = st.builds(
    lambda sink, recent, scored, odd, query, more: Limits(
        budget_tokens=32 * (-(-sink // 32) - (-recent // 32) + scored) + odd,
        reserve_tokens=2 * query + more,
        sink_tokens=sink,
        recent_tokens=recent,
        query_tokens=query,
    ),
    sink=st.integers(1, 200),
    recent=st.integers(1, 500),
    scored=st.integers(1, 64),
    odd=st.integers(0, 31),
    query=st.integers(32, 400),
    more=st.integers(0, 200),
)


@given(LIMITS)
def test_a_full_budget_leaves_room_for_query_chunk_and_answer(limits: Limits) -> None:
    budget = limits.budget_blocks
    assert limits.chunk_tokens >= 32 and limits.chunk_tokens % 32 == 0
    assert limits.fits(budget, limits.chunk_tokens)
    assert limits.fits(budget, limits.query_tokens)
    prompt = 32 * budget + limits.query_tokens
    assert limits.generation_tokens(prompt) >= limits.reserve_tokens - limits.query_tokens - 2


@given(LIMITS, st.integers(0, 600))
def test_what_fits_is_a_prompt_within_the_context(limits: Limits, tokens: int) -> None:
    room = limits.room_blocks(tokens)
    assert limits.fits(room, tokens) and not limits.fits(room + 1, tokens)
    assert 32 * room + tokens <= limits.context_tokens - 8 < 32 * (room + 1) + tokens
    assert limits.generation_tokens(32 * room + tokens) >= 6
