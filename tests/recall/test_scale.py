"""What a step decides on its own must not be felt, in a session of a million tokens."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np
import pytest

from kvws.recall.plan import plan_view
from kvws.recall.regions import Regions
from kvws.recall.spans import PromptSpans, Span
from kvws.recalling import _candidates
from kvws.session.workspace import Workspace

BLOCKS = 31_250
BUDGET = 512


def best_ms(work: Callable[[], object]) -> float:
    """Of several times, so that another process does not count."""
    times: list[float] = []
    for _ in range(15):
        begin = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - begin))
    return min(times)


@pytest.fixture(scope="module")
def workspace() -> Workspace:
    """One line of a million tokens."""
    rng = random.Random(4)
    workspace = Workspace("w")
    tokens = [rng.randrange(50_000) for _ in range(32 * BLOCKS)]
    line = tuple(workspace.allocate((), tokens))
    workspace.record(workspace.thread("main"), line, line[-BUDGET:], ())
    return workspace


def test_candidates_and_plan_take_less_than_five_milliseconds(workspace: Workspace) -> None:
    thread = workspace.thread("main")
    scores = np.random.default_rng(4).random(BLOCKS, dtype=np.float32)
    spans = PromptSpans(
        system=Span(0, 20_000),
        policies=(Span(21_000, 25_000),),
        task=Span(26_000, 26_500),
        trajectory=Span(26_500, 32 * BLOCKS),
    )

    def decide() -> None:
        regions = Regions.of_prompt(
            thread.line, spans, sink_blocks=1, recent_blocks=128, budget_blocks=BUDGET
        )
        candidates = _candidates(regions, thread.line, workspace, thread)
        plan = plan_view(
            current=thread.view,
            regions=regions,
            candidates=np.flatnonzero(candidates),
            scores=scores,
            budget_blocks=BUDGET,
            room_blocks=BUDGET + 64,
        )
        assert len(plan.view) == BUDGET and regions.shrunk

    assert best_ms(decide) < 5


def test_what_a_step_does_with_its_line_takes_less_than_a_millisecond_each(
    workspace: Workspace,
) -> None:
    thread = workspace.thread("main")
    tail = list(range(60, 160))
    works: dict[str, Callable[[], object]] = {
        "align behind a known line": lambda: workspace.align(tail, thread.line),
        "find what an unfinished step left": lambda: thread.unfinished.intersection(thread.line),
        "tell a line's regions": lambda: Regions.of_line(thread.line, 1, 128),
        "grow a line": lambda: (*thread.line, 1),
        "tell what may be recalled": lambda: workspace.recallable("main", thread.line),
        "record": lambda: workspace.record(thread, thread.line, thread.view, ()),
    }
    times = {name: best_ms(work) for name, work in works.items()}
    assert not {name: ms for name, ms in times.items() if ms >= 1}
