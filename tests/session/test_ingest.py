"""What is prefilled ahead of the query, and over which window."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvws.session.ingest import ahead_of_query, runs_of, window
from kvws.session.workspace import Workspace


@pytest.mark.parametrize(
    ("pending", "query", "ahead"),
    [(1, 64, 0), (64, 64, 0), (65, 64, 32), (96, 64, 32), (97, 64, 64), (33, 32, 32)],
)
def test_whole_blocks_are_taken_from_the_front(pending: int, query: int, ahead: int) -> None:
    assert ahead_of_query(pending, query) == ahead


@given(st.integers(1, 10_000), st.integers(32, 600))
def test_the_rest_is_a_query_of_at_least_one_token(pending: int, query: int) -> None:
    ahead = ahead_of_query(pending, query)
    assert ahead % 32 == 0
    assert 1 <= pending - ahead <= query
    assert ahead == 0 or pending - ahead + 32 > query, "more was ingested than necessary"


def test_a_line_within_the_budget_is_its_own_window() -> None:
    assert window((4, 5, 6), 1, 3) == (4, 5, 6)
    assert window((), 1, 3) == ()


def test_a_longer_line_keeps_sink_and_newest_tail() -> None:
    assert window((0, 1, 2, 3, 4, 5), 2, 4) == (0, 1, 4, 5)
    assert window((0, 1, 2, 3), 0, 2) == (2, 3)


@given(st.integers(0, 60), st.integers(1, 5), st.integers(6, 30))
def test_a_window_fills_the_budget_in_order(length: int, sink: int, budget: int) -> None:
    line = tuple(range(100, 100 + length))
    seen = window(line, sink, budget)
    assert len(seen) == min(length, budget)
    assert list(seen) == sorted(set(seen))
    assert seen[:sink] == line[:sink] and seen[-1:] == line[-1:]


def test_blocks_run_on_behind_their_parents_whichever_is_asked_for_first() -> None:
    workspace = Workspace("w")
    line = workspace.allocate((), [1] * 64 + [2] * 64)
    early_branch = workspace.allocate(line[:1], [3] * 64)
    blocks = [early_branch[1], line[3], line[2], line[1]]
    assert runs_of(blocks, workspace, most_blocks=9) == [line[1:], early_branch[1:]]
    assert runs_of(blocks, workspace, most_blocks=2) == [line[1:3], early_branch[1:], line[3:]]
