"""Selection: which blocks the next view keeps, loads and drops, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvws.recall.plan import Action, Decision, Plan, plan_view
from kvws.recall.regions import Reason, Regions


def planned(
    current: tuple[int, ...],
    scores: dict[int, float],
    *,
    line: range = range(10),
    budget: int = 5,
    room: int = 8,
    sink: int = 1,
    recent: int = 2,
) -> Plan:
    """Plan for a line whose blocks all compete except sink and recent."""
    regions = Regions.of_line(tuple(line), sink, recent)
    mask = regions.competes(len(line))
    return plan_view(
        current=current,
        regions=regions,
        candidates=[block for block in line if mask[block]],
        scores=[scores.get(block, 0.0) for block in line],
        budget_blocks=budget,
        room_blocks=room,
    )


def test_sink_best_and_recent_in_order_of_age() -> None:
    plan = planned((), {6: 3.0, 2: 2.0, 4: 1.0})
    assert plan.view == (0, 2, 6, 8, 9)


def test_ties_go_to_the_newer_block() -> None:
    assert planned((), {}).view == (0, 6, 7, 8, 9)
    assert planned((), {2: 1.0, 3: 1.0, 4: 1.0}).view == (0, 3, 4, 8, 9)


def test_the_best_of_those_outside_the_view_are_near_misses() -> None:
    plan = planned((), {6: 3.0, 2: 2.0, 4: 1.0, 5: 0.5}, budget=5)
    assert plan.near_misses == (4,), "a quarter of the budget"
    assert planned((0, 2, 4, 6, 8, 9), {6: 3.0, 2: 2.0, 4: 1.0}).near_misses == ()


def test_the_selection_the_view_already_holds_leaves_it_alone() -> None:
    current = (0, 2, 4, 6, 8, 9)
    plan = planned(current, {6: 3.0, 2: 2.0})
    assert plan.view == current and plan.unchanged
    reasons = {decision.block: decision.reason for decision in plan.decisions}
    assert reasons == {
        0: Reason.SINK,
        2: Reason.SCORE,
        4: Reason.STILL_FITS,
        6: Reason.SCORE,
        8: Reason.RECENT,
        9: Reason.RECENT,
    }


def test_a_superset_beyond_the_room_is_cut_to_the_selection() -> None:
    plan = planned((0, 2, 4, 6, 8, 9), {6: 3.0, 2: 2.0}, room=5)
    assert plan.view == (0, 2, 6, 8, 9) and not plan.unchanged
    assert plan.decisions[-1] == Decision(4, Action.DROP, Reason.OUTSCORED, 0.0)


def test_the_order_of_a_kept_view_is_kept() -> None:
    current = (0, 6, 2, 8, 9)
    plan = planned(current, {6: 3.0, 2: 2.0})
    assert plan.view == current and plan.unchanged


def test_a_changed_selection_says_what_it_keeps_loads_and_drops() -> None:
    plan = planned((0, 3, 4, 8, 9), {3: 2.0, 5: 1.5, 4: 1.0})
    assert plan.decisions == (
        Decision(0, Action.KEEP, Reason.SINK, None),
        Decision(3, Action.KEEP, Reason.SCORE, 2.0),
        Decision(5, Action.LOAD, Reason.SCORE, 1.5),
        Decision(8, Action.KEEP, Reason.RECENT, None),
        Decision(9, Action.KEEP, Reason.RECENT, None),
        Decision(4, Action.DROP, Reason.OUTSCORED, 1.0),
    )
    actions = Counter(decision.action for decision in plan.decisions)
    assert actions == {Action.KEEP: 4, Action.LOAD: 1, Action.DROP: 1}


def test_a_line_of_other_blocks_still_recalls_those_of_another_thread() -> None:
    """Numbers are by age in the workspace, not by place in the line."""
    regions = Regions(sink=(5,), recent=(7,))
    plan = plan_view(
        current=(5, 6, 7),
        regions=regions,
        candidates=[0, 1, 6],
        scores=[0.1, 5.0, 1.0, 0, 0, 0, 0.5, 0],
        budget_blocks=4,
        room_blocks=4,
    )
    assert plan.view == (5, 1, 6, 7)


def test_sink_and_recent_are_in_the_view_though_the_budget_is_small() -> None:
    assert planned((), {4: 9.0}, budget=2).view == (0, 8, 9)


@pytest.mark.parametrize(
    ("line", "sink", "recent", "expected"),
    [
        ((4, 5, 6, 7), 1, 2, Regions((4,), (6, 7))),
        ((4, 5, 6), 1, 2, Regions((4,), (5, 6))),
        ((4, 5), 1, 2, Regions((4,), (5,))),
        ((4,), 1, 2, Regions((4,), ())),
        ((), 1, 2, Regions((), ())),
    ],
)
def test_regions_of_a_line_do_not_overlap(
    line: tuple[int, ...], sink: int, recent: int, expected: Regions
) -> None:
    assert Regions.of_line(line, sink, recent) == expected


def test_sink_and_recent_do_not_compete() -> None:
    assert Regions((0,), (3, 4)).competes(6) == bytearray([0, 1, 1, 0, 0, 1])


def test_pinned_blocks_stand_by_age_between_those_that_scored() -> None:
    plan = plan_view(
        current=(),
        regions=Regions((0,), (8, 9), {3: Reason.SYSTEM, 6: Reason.TASK}),
        candidates=[1, 2, 4, 5, 7],
        scores=[0, 0, 0, 99, 3, 0, 0, 2, 0, 0],
        budget_blocks=7,
        room_blocks=7,
    )
    assert plan.view == (0, 3, 4, 6, 7, 8, 9)
    reasons = [(d.reason, d.score) for d in plan.decisions]
    assert reasons == [
        (Reason.SINK, None),
        (Reason.SYSTEM, None),
        (Reason.SCORE, 3.0),
        (Reason.TASK, None),
        (Reason.SCORE, 2.0),
        (Reason.RECENT, None),
        (Reason.RECENT, None),
    ]


@st.composite
def selections(draw: st.DrawFn) -> dict[str, object]:
    blocks = draw(st.integers(6, 24))
    sink, recent = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    line = draw(st.permutations(range(blocks)))[: draw(st.integers(sink + recent, blocks))]
    regions = Regions.of_line(tuple(sorted(line)), sink, recent)
    mask = regions.competes(blocks)
    budget = draw(st.integers(sink + recent + 1, 12))
    return {
        "current": tuple(draw(st.permutations(range(blocks)))[: draw(st.integers(0, blocks))]),
        "regions": regions,
        "candidates": [b for b in range(blocks) if mask[b] and draw(st.booleans())],
        "scores": draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=24, max_size=24)),
        "budget_blocks": budget,
        "room_blocks": budget + draw(st.integers(0, 8)),
    }


@settings(max_examples=300, deadline=None)
@given(selections())
def test_every_plan_keeps_its_promises(case: dict[str, object]) -> None:
    plan = plan_view(**case)  # type: ignore[arg-type]
    current: tuple[int, ...] = case["current"]  # type: ignore[assignment]
    regions: Regions = case["regions"]  # type: ignore[assignment]
    candidates: list[int] = case["candidates"]  # type: ignore[assignment]
    scores: list[float] = case["scores"]  # type: ignore[assignment]
    budget: int = case["budget_blocks"]  # type: ignore[assignment]
    room: int = case["room_blocks"]  # type: ignore[assignment]

    assert {*regions.sink, *regions.recent} <= set(plan.view)
    assert len(set(plan.view)) == len(plan.view) <= room
    assert plan.unchanged == (plan.view == current)
    if not plan.unchanged:
        assert len(plan.view) <= budget
        first, last = len(regions.sink), len(plan.view) - len(regions.recent)
        scored = plan.view[first:last]
        assert plan.view[:first] == regions.sink and plan.view[last:] == regions.recent
        assert list(scored) == sorted(scored) and set(scored) <= set(candidates)
        left_out = set(candidates) - set(scored)
        if scored and left_out:
            assert min((scores[b], b) for b in scored) > max((scores[b], b) for b in left_out)

    of_view = plan.decisions[: len(plan.view)]
    dropped = plan.decisions[len(plan.view) :]
    assert tuple(decision.block for decision in of_view) == plan.view
    assert {d.block for d in of_view if d.action is Action.KEEP} == set(plan.view) & set(current)
    assert {d.block for d in of_view if d.action is Action.LOAD} == set(plan.view) - set(current)
    assert {d.block for d in dropped} == set(current) - set(plan.view)
    assert all(d.action is Action.DROP and d.reason is Reason.OUTSCORED for d in dropped)
    fixed = {*regions.sink, *regions.recent}
    assert all((d.score is None) == (d.block in fixed) for d in of_view)


def planned_by_sorting(
    *,
    current: Sequence[int],
    regions: Regions,
    candidates: Sequence[int],
    scores: Sequence[float],
    budget_blocks: int,
    room_blocks: int,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(view, near misses) of sink, recent and the best, by the plainest code there is."""
    room_for_scored = max(0, budget_blocks - len(regions.sink) - len(regions.recent))
    ranked = sorted(candidates, key=lambda block: (-scores[block], -block))
    view = (*regions.sink, *sorted(ranked[:room_for_scored]), *regions.recent)
    if set(view) <= set(current) and len(current) <= room_blocks:
        view = tuple(current)
    misses = ranked[room_for_scored : room_for_scored + budget_blocks // 4]
    return view, tuple(block for block in misses if block not in view)


@settings(max_examples=500, deadline=None)
@given(selections(), st.sampled_from([list, np.float32, np.float64]))
def test_a_plan_is_what_sorting_all_candidates_would_give(
    case: dict[str, object], kind: type
) -> None:
    expected = planned_by_sorting(**case)  # type: ignore[arg-type]
    if kind is not list:
        case["scores"] = np.array(case["scores"], dtype=kind)
        case["candidates"] = np.array(case["candidates"], dtype=np.int64)
    plan = plan_view(**case)  # type: ignore[arg-type]
    assert (plan.view, plan.near_misses) == expected
    assert all(type(block) is int for block in (*plan.view, *plan.near_misses))
