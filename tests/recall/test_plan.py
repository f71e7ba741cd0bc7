"""Planning: which blocks the next view keeps, loads and drops, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvws.recall.choice import Chosen
from kvws.recall.plan import (
    Action,
    Decision,
    Plan,
    places_for_chosen,
    plan_view,
    wanted_of_ranking,
)
from kvws.recall.recipe import SignalName
from kvws.recall.regions import Reason, Regions

CONTENT, LEXICAL = SignalName.CONTENT, SignalName.LEXICAL


def chosen(*blocks: int, reason: Reason = Reason.SCORE) -> list[Chosen]:
    """Blocks, best first; the one of rank r scores 1 / (1 + r)."""
    return [
        Chosen(block, reason, 1 / (1 + rank), {LEXICAL: rank}, LEXICAL)
        for rank, block in enumerate(blocks)
    ]


def decided(block: int, action: Action, reason: Reason, rank: int) -> Decision:
    """The decision about a block that `chosen` put at a rank."""
    return Decision(block, action, reason, 1 / (1 + rank), LEXICAL, {LEXICAL: rank})


def planned(
    current: tuple[int, ...],
    best_first: Sequence[int],
    *,
    line: range = range(10),
    budget: int = 5,
    room: int = 8,
    sink: int = 1,
    recent: int = 2,
) -> Plan:
    return plan_view(
        current=current,
        regions=Regions.of_line(tuple(line), sink, recent),
        chosen=chosen(*best_first),
        budget_blocks=budget,
        room_blocks=room,
    )


def test_sink_best_and_recent_in_order_of_age() -> None:
    assert planned((), [6, 2, 4]).view == (0, 2, 6, 8, 9)


def test_fewer_that_deserve_a_place_leave_places_free() -> None:
    assert planned((), [6]).view == (0, 6, 8, 9)
    assert planned((), []).view == (0, 8, 9)


def test_those_chosen_that_found_no_place_are_near_misses_best_first() -> None:
    assert planned((), [6, 2, 5, 4]).near_misses == (5, 4)
    assert planned((0, 2, 4, 6, 8, 9), [6, 2, 5, 4]).near_misses == (5,), "4 is in the view"


def test_a_quarter_of_the_budget_is_chosen_beyond_the_places() -> None:
    regions = Regions((0,), (8, 9), {3: Reason.TASK})
    assert places_for_chosen(regions, 12) == 8
    assert wanted_of_ranking(regions, 12) == 8 + 3
    assert places_for_chosen(regions, 3) == 0, "regions larger than the budget"
    assert wanted_of_ranking(regions, 3) == 0


def test_the_selection_the_view_already_holds_leaves_it_alone() -> None:
    current = (0, 2, 4, 6, 8, 9)
    plan = planned(current, [6, 2])
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
    plan = planned((0, 2, 4, 6, 8, 9), [6, 2, 4], room=5)
    assert plan.view == (0, 2, 6, 8, 9) and not plan.unchanged
    assert plan.decisions[-1] == decided(4, Action.DROP, Reason.OUTSCORED, rank=2)


def test_the_order_of_a_kept_view_is_kept() -> None:
    current = (0, 6, 2, 8, 9)
    plan = planned(current, [6, 2])
    assert plan.view == current and plan.unchanged


def test_a_changed_selection_says_what_it_keeps_loads_and_drops() -> None:
    plan = planned((0, 3, 4, 7, 8, 9), [3, 5, 4])
    assert plan.decisions == (
        Decision(0, Action.KEEP, Reason.SINK),
        decided(3, Action.KEEP, Reason.SCORE, rank=0),
        decided(5, Action.LOAD, Reason.SCORE, rank=1),
        Decision(8, Action.KEEP, Reason.RECENT),
        Decision(9, Action.KEEP, Reason.RECENT),
        decided(4, Action.DROP, Reason.OUTSCORED, rank=2),
        Decision(7, Action.DROP, Reason.OUTSCORED),
    )
    actions = Counter(decision.action for decision in plan.decisions)
    assert actions == {Action.KEEP: 4, Action.LOAD: 1, Action.DROP: 2}


def test_the_reason_for_which_a_block_was_chosen_is_the_reason_it_is_in_the_view() -> None:
    plan = plan_view(
        current=(0, 4, 8, 9),
        regions=Regions((0,), (8, 9)),
        chosen=[
            Chosen(4, Reason.ANCHOR, 0.5, {CONTENT: 0, LEXICAL: 7}, CONTENT),
            Chosen(5, Reason.NEIGHBOUR, 0.1, {LEXICAL: 3}, None),
            *chosen(7, reason=Reason.NEWEST_COPY),
        ],
        budget_blocks=6,
        room_blocks=8,
    )
    assert plan.decisions[1:4] == (
        Decision(4, Action.KEEP, Reason.ANCHOR, 0.5, CONTENT, {CONTENT: 0, LEXICAL: 7}),
        Decision(5, Action.LOAD, Reason.NEIGHBOUR, 0.1, None, {LEXICAL: 3}),
        decided(7, Action.LOAD, Reason.NEWEST_COPY, rank=0),
    )


def test_a_line_of_other_blocks_still_recalls_those_of_another_thread() -> None:
    """Numbers are by age in the workspace, not by place in the line."""
    plan = plan_view(
        current=(5, 6, 7),
        regions=Regions(sink=(5,), recent=(7,)),
        chosen=chosen(1, 6, 0),
        budget_blocks=4,
        room_blocks=4,
    )
    assert plan.view == (5, 1, 6, 7)


def test_sink_and_recent_are_in_the_view_though_the_budget_is_small() -> None:
    assert planned((), [4], budget=2).view == (0, 8, 9)


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
        chosen=chosen(4, 7),
        budget_blocks=7,
        room_blocks=7,
    )
    assert plan.view == (0, 3, 4, 6, 7, 8, 9)
    reasons = [(d.reason, d.score) for d in plan.decisions]
    assert reasons == [
        (Reason.SINK, None),
        (Reason.SYSTEM, None),
        (Reason.SCORE, 1.0),
        (Reason.TASK, None),
        (Reason.SCORE, 0.5),
        (Reason.RECENT, None),
        (Reason.RECENT, None),
    ]


@dataclass(frozen=True)
class Case:
    current: tuple[int, ...]
    regions: Regions
    best_first: tuple[int, ...]
    budget_blocks: int
    room_blocks: int

    def planned(self) -> Plan:
        return plan_view(
            current=self.current,
            regions=self.regions,
            chosen=chosen(*self.best_first),
            budget_blocks=self.budget_blocks,
            room_blocks=self.room_blocks,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    blocks = draw(st.integers(6, 24))
    sink, recent = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    line = draw(st.permutations(range(blocks)))[: draw(st.integers(sink + recent, blocks))]
    of_line = Regions.of_line(tuple(sorted(line)), sink, recent)
    competing = [block for block in range(blocks) if block not in of_line.fixed]
    pinned = sorted(draw(st.permutations(competing))[: draw(st.integers(0, 2))])
    regions = Regions(of_line.sink, of_line.recent, dict.fromkeys(pinned, Reason.TASK))
    budget = draw(st.integers(len(regions.fixed), 12))
    rivals = draw(st.permutations([block for block in competing if block not in pinned]))
    return Case(
        current=tuple(draw(st.permutations(range(blocks)))[: draw(st.integers(0, blocks))]),
        regions=regions,
        best_first=tuple(rivals[: draw(st.integers(0, len(rivals)))]),
        budget_blocks=budget,
        room_blocks=budget + draw(st.integers(0, 8)),
    )


@settings(max_examples=300, deadline=None)
@given(cases())
def test_every_plan_keeps_its_promises(case: Case) -> None:
    plan, regions, current = case.planned(), case.regions, case.current
    assert set(regions.fixed) <= set(plan.view)
    assert len(set(plan.view)) == len(plan.view) <= case.room_blocks
    assert plan.unchanged == (plan.view == current)
    places = places_for_chosen(regions, case.budget_blocks)
    assert set(case.best_first[:places]) <= set(plan.view), "the most deserving are in"
    if not plan.unchanged:
        assert len(plan.view) <= case.budget_blocks
        first, last = len(regions.sink), len(plan.view) - len(regions.recent)
        between = plan.view[first:last]
        assert plan.view[:first] == regions.sink and plan.view[last:] == regions.recent
        assert list(between) == sorted([*regions.pinned, *case.best_first[:places]])
    assert plan.near_misses == tuple(b for b in case.best_first[places:] if b not in plan.view)

    of_view = plan.decisions[: len(plan.view)]
    dropped = plan.decisions[len(plan.view) :]
    assert tuple(decision.block for decision in of_view) == plan.view
    assert {d.block for d in of_view if d.action is Action.KEEP} == set(plan.view) & set(current)
    assert {d.block for d in of_view if d.action is Action.LOAD} == set(plan.view) - set(current)
    assert {d.block for d in dropped} == set(current) - set(plan.view)
    assert all(d.action is Action.DROP and d.reason is Reason.OUTSCORED for d in dropped)
    known = set(case.best_first)
    assert all((d.score is not None) == (d.block in known) for d in plan.decisions)


@settings(max_examples=300, deadline=None)
@given(cases())
def test_a_plan_made_again_on_its_own_view_changes_nothing(case: Case) -> None:
    view = case.planned().view
    again = Case(view, case.regions, case.best_first, case.budget_blocks, case.room_blocks)
    assert again.planned().unchanged and again.planned().view == view
