"""Which blocks the next execution view keeps, loads and drops. A pure decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvws.recall.choice import Chosen
from kvws.recall.recipe import SignalName
from kvws.recall.regions import Reason, Regions


class Action(StrEnum):
    """What happens to a block between the current view and the next."""

    KEEP = "keep"
    LOAD = "load"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class Decision:
    """One block's fate.

    Attributes:
        score: what the signals give it together; None for a block that did not compete, or was
            not among the best of those that did.
        signal: the one that gives most, where that is the reason.
        ranks: of the signals that rank it, from 0.
    """

    block: int
    action: Action
    reason: Reason
    score: float | None = None
    signal: SignalName | None = None
    ranks: Mapping[SignalName, int] = field(default_factory=dict[SignalName, int])


@dataclass(frozen=True)
class Plan:
    """The next view and how it came about.

    Attributes:
        view: blocks in view order: sink, the rest by age, recent.
        decisions: one per block of the next view, in its order, then one per dropped block.
        unchanged: the next view is the current one: what was computed on it stays valid.
        near_misses: chosen blocks that found no place, best first. They are the likeliest to be
            selected next.
    """

    view: tuple[int, ...]
    decisions: tuple[Decision, ...]
    unchanged: bool
    near_misses: tuple[int, ...] = ()


def plan_view(
    *,
    current: Sequence[int],
    regions: Regions,
    chosen: Sequence[Chosen],
    budget_blocks: int,
    room_blocks: int,
) -> Plan:
    """Fill the budget: the regions first, then the blocks that were chosen, as far as they fit.

    When the current view already holds every selected block and still fits the room, it is kept
    whole: a superset costs nothing, a new view costs a prefill.

    Between sink and recent, blocks stand by their number. A block's number is larger than its
    parent's, so the blocks of one line stand in the order of that line, whatever they are kept
    for; blocks of other lines stand between them where they were written. The newest blocks of
    the thread's line are last in any case: the question continues them.

    Args:
        current: blocks of the view that the device may still hold, in view order.
        regions: blocks that are in every view.
        chosen: blocks that competed, distinct, the most deserving first; none of a region.
        budget_blocks: size of a freshly selected view.
        room_blocks: blocks that fit beside query and generation; at least `budget_blocks`.
    """
    places = places_for_chosen(regions, budget_blocks)
    selected = {each.block: each for each in chosen[:places]}
    view = (*regions.sink, *sorted([*regions.pinned, *selected]), *regions.recent)
    had = set(current)
    if had.issuperset(view) and len(current) <= room_blocks:
        view = tuple(current)
    has = set(view)
    return Plan(
        view=view,
        decisions=_decide(tuple(current), view, regions, selected, chosen),
        unchanged=view == tuple(current),
        near_misses=tuple(each.block for each in chosen[places:] if each.block not in has),
    )


def places_for_chosen(regions: Regions, budget_blocks: int) -> int:
    """Places of a freshly selected view that its regions leave."""
    return max(0, budget_blocks - len(regions.fixed))


def wanted_of_ranking(regions: Regions, budget_blocks: int) -> int:
    """Blocks to choose: those that get a place, and a quarter of the budget that just miss one."""
    return places_for_chosen(regions, budget_blocks) + budget_blocks // 4


def _decide(
    current: tuple[int, ...],
    view: tuple[int, ...],
    regions: Regions,
    selected: Mapping[int, Chosen],
    chosen: Sequence[Chosen],
) -> tuple[Decision, ...]:
    fixed = {
        **dict.fromkeys(regions.sink, Reason.SINK),
        **regions.pinned,
        **dict.fromkeys(regions.recent, Reason.RECENT),
    }
    had, has = set(current), set(view)
    known = {each.block: each for each in chosen}
    decisions: list[Decision] = []
    for block in view:
        action = Action.KEEP if block in had else Action.LOAD
        if block in fixed:
            decisions.append(Decision(block, action, fixed[block]))
        elif block in selected:
            decisions.append(_with_ranks(block, action, selected[block].reason, known))
        else:
            decisions.append(_with_ranks(block, action, Reason.STILL_FITS, known))
    for block in current:
        if block not in has:
            decisions.append(_with_ranks(block, Action.DROP, Reason.OUTSCORED, known))
    return tuple(decisions)


def _with_ranks(
    block: int, action: Action, reason: Reason, known: Mapping[int, Chosen]
) -> Decision:
    found = known.get(block)
    if found is None:
        return Decision(block, action, reason)
    return Decision(block, action, reason, found.score, found.signal, found.ranks)
