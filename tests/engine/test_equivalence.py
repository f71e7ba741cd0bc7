"""A budget that holds the session changes nothing: the answer is the stock engine's."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvws.blocks.page import Slice, whole_block
from kvws.engine.launch import RunningEngine
from kvws.limits import Limits
from kvws.session.workspace import Workspace
from tests.engine.asking import Answer, ask_plainly, ask_view, ask_workspace, watched_ids
from tests.engine.oracle import Oracle, rows_of_blocks

HISTORY_TOKENS = 640
ROOMY = Limits(1024, 1024, 32, 256, 128)
WATCHED = watched_ids(49152)
FP32_TOLERANCE = 1e-3


def assert_close(difference: float) -> None:
    print(f"measured: max |Δ log-probability| {difference:.1e}")
    assert difference <= FP32_TOLERANCE


@pytest.fixture(scope="module")
def history(text: list[int]) -> list[int]:
    return text[:HISTORY_TOKENS]


@pytest.fixture(scope="module")
def query(text: list[int]) -> list[int]:
    return text[HISTORY_TOKENS : HISTORY_TOKENS + 40]


@pytest.fixture(scope="module")
def plain(running: RunningEngine, history: list[int], query: list[int]) -> Answer:
    return running.run(ask_plainly(running.engine, [*history, *query], 8, WATCHED))


@pytest.fixture(scope="module")
def workspace(running: RunningEngine, history: list[int]) -> Workspace:
    """The history, grown over three steps."""
    workspace = Workspace("equivalence")
    for length in (200, 420, HISTORY_TOKENS + 1):
        running.run(
            ask_workspace(running.engine, workspace, [*history, 0][:length], ROOMY, count=1)
        )
    return workspace


@pytest.fixture(scope="module")
def oracle(smollm2: Path) -> Oracle:
    return Oracle(str(smollm2))


def test_the_session_on_the_device_answers_like_the_stock_engine(
    running: RunningEngine,
    workspace: Workspace,
    history: list[int],
    query: list[int],
    plain: Answer,
) -> None:
    answer = running.run(
        ask_workspace(
            running.engine, workspace, [*history, *query], ROOMY, count=8, watched=WATCHED
        )
    )
    assert answer.report is not None and not answer.report.recalled
    assert answer.report.computed_tokens == len(query)
    assert answer.tokens == plain.tokens
    assert_close(answer.off_by(plain))


def test_so_does_the_session_restored_after_the_device_cache_was_flushed(
    running: RunningEngine,
    workspace: Workspace,
    history: list[int],
    query: list[int],
    plain: Answer,
) -> None:
    running.run(running.engine.flush_device_cache())
    answer = running.run(
        ask_workspace(
            running.engine, workspace, [*history, *query], ROOMY, count=8, watched=WATCHED
        )
    )
    assert answer.report is not None
    blocks = (len(history) + len(query)) // 32  # the last answer's step registered its query
    assert answer.report.loaded_pages == answer.report.view_blocks == blocks
    assert answer.report.computed_tokens == len(history) + len(query) - 32 * blocks
    assert answer.tokens == plain.tokens
    assert_close(answer.off_by(plain))


def test_so_does_the_session_restored_after_other_traffic_evicted_it(
    running: RunningEngine,
    workspace: Workspace,
    text: list[int],
    history: list[int],
    query: list[int],
    plain: Answer,
) -> None:
    for start in range(1000, 6000, 1000):
        running.run(ask_plainly(running.engine, text[start : start + 1000], 1, [0]))
    answer = running.run(
        ask_workspace(
            running.engine, workspace, [*history, *query], ROOMY, count=8, watched=WATCHED
        )
    )
    assert answer.report is not None and answer.report.loaded_pages > 0
    assert answer.tokens == plain.tokens
    assert_close(answer.off_by(plain))


@pytest.mark.parametrize(
    "view",
    [[0, 1, 5, 6, 11, 17, 18], [0, 1, 5, 9, 11, 17, 18], [7], [18, 3, 0]],
    ids=["sparse", "shares a prefix with the last", "one block", "out of order"],
)
def test_a_sparse_view_answers_like_transformers_on_the_same_raw_keys(
    running: RunningEngine,
    workspace: Workspace,
    history: list[int],
    query: list[int],
    oracle: Oracle,
    view: list[int],
) -> None:
    answer = running.run(
        ask_view(
            running.engine, workspace, [whole_block(b) for b in view], query, 4, WATCHED
        )
    )
    tokens, logprobs = oracle.greedy(oracle.history(history), rows_of_blocks(view), query, 4)
    assert answer.tokens == tokens
    assert_close(float((answer.logprobs - logprobs[:, ::8]).abs().max()))


def test_a_page_packed_from_slices_answers_like_transformers_on_the_same_rows(
    running: RunningEngine,
    workspace: Workspace,
    history: list[int],
    query: list[int],
    oracle: Oracle,
) -> None:
    packed = (Slice(3, 4, 9), Slice(8, 0, 16), Slice(12, 20, 7))
    sources = [whole_block(0), packed, whole_block(15)]
    answer = running.run(ask_view(running.engine, workspace, sources, query, 4, WATCHED))
    rows = [
        block * 32 + offset + i
        for source in sources
        for block, offset, length in source
        for i in range(length)
    ]
    tokens, logprobs = oracle.greedy(
        oracle.history(history), rows_of_blocks([0]).new_tensor(rows), query, 4
    )
    assert answer.tokens == tokens
    assert_close(float((answer.logprobs - logprobs[:, ::8]).abs().max()))


def test_the_comparison_notices_a_block_at_a_wrong_place(
    running: RunningEngine,
    workspace: Workspace,
    history: list[int],
    query: list[int],
    oracle: Oracle,
) -> None:
    answer = running.run(
        ask_view(
            running.engine, workspace, [whole_block(b) for b in (0, 5, 11)], query, 4, WATCHED
        )
    )
    _, logprobs = oracle.greedy(oracle.history(history), rows_of_blocks([0, 11, 5]), query, 4)
    assert float((answer.logprobs[0] - logprobs[0, ::8]).abs().max()) > 10 * FP32_TOLERANCE
