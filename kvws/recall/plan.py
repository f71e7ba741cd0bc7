"""Which blocks the next execution view keeps, loads and drops. A pure decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from kvws.recall.regions import Reason, Regions

Numbers = Sequence[int] | npt.NDArray[np.integer[Any]]
Values = Sequence[float] | npt.NDArray[np.floating[Any]]


class Action(StrEnum):
    """What happens to a block between the current view and the next."""

    KEEP = "keep"
    LOAD = "load"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class Decision:
    """One block's fate. `score` is None for blocks that did not compete."""

    block: int
    action: Action
    reason: Reason
    score: float | None


@dataclass(frozen=True)
class Plan:
    """The next view and how it came about.

    Attributes:
        view: blocks in view order: sink, the rest by age, recent.
        decisions: one per block of the next view, in its order, then one per dropped block.
        unchanged: the next view is the current one: what was computed on it stays valid.
        near_misses: candidates outside the view that scored just below those in it, best first:
            as many as a quarter of the budget. They are the likeliest to be selected next.
    """

    view: tuple[int, ...]
    decisions: tuple[Decision, ...]
    unchanged: bool
    near_misses: tuple[int, ...] = ()


def plan_view(
    *,
    current: Sequence[int],
    regions: Regions,
    candidates: Numbers,
    scores: Values,
    budget_blocks: int,
    room_blocks: int,
) -> Plan:
    """Fill the budget: the regions first, then the best-scored candidates (KVMem, selection).

    Ties go to the newer block. When the current view already holds every selected block and still
    fits the room, it is kept whole: a superset costs nothing, a new view costs a prefill.

    Between sink and recent, blocks stand by their number. A block's number is larger than its
    parent's, so the blocks of one line stand in the order of that line, whatever they are kept
    for; blocks of other lines stand between them where they were written. The newest blocks of
    the thread's line are last in any case: the question continues them.

    Args:
        current: blocks of the view the query was probed on, in view order.
        regions: blocks that are in every view.
        candidates: distinct block numbers that competed; none of a region.
        scores: by block number, at least as long as the largest candidate.
        budget_blocks: size of a freshly selected view.
        room_blocks: blocks that fit beside query and generation; at least `budget_blocks`.
    """
    room_for_scored = max(0, budget_blocks - len(regions.fixed))
    scores = np.asarray(scores)
    ranked = _best(candidates, scores, room_for_scored + budget_blocks // 4)
    chosen = ranked[:room_for_scored]
    view = (*regions.sink, *sorted([*regions.pinned, *chosen]), *regions.recent)
    had = set(current)
    if had.issuperset(view) and len(current) <= room_blocks:
        view = tuple(current)
    has = set(view)
    return Plan(
        view=view,
        decisions=_decide(tuple(current), view, regions, set(chosen), scores),
        unchanged=view == tuple(current),
        near_misses=tuple(block for block in ranked[room_for_scored:] if block not in has),
    )


def _best(candidates: Numbers, scores: npt.NDArray[Any], count: int) -> list[int]:
    """The `count` best candidates, best first; of equal scores the newer block."""
    blocks = np.asarray(candidates, dtype=np.int64)
    of_blocks = scores[blocks]
    if 0 < count < len(blocks):
        cut = np.partition(of_blocks, -count)[-count]
        above = blocks[of_blocks > cut]
        at_cut = np.sort(blocks[of_blocks == cut])
        blocks = np.concatenate([above, at_cut[len(at_cut) - (count - len(above)) :]])
        of_blocks = scores[blocks]
    return blocks[np.lexsort((-blocks, -of_blocks))[:count]].tolist()


def _decide(
    current: tuple[int, ...],
    view: tuple[int, ...],
    regions: Regions,
    chosen: set[int],
    scores: npt.NDArray[Any],
) -> tuple[Decision, ...]:
    fixed = {
        **dict.fromkeys(regions.sink, Reason.SINK),
        **regions.pinned,
        **dict.fromkeys(regions.recent, Reason.RECENT),
    }
    had, has = set(current), set(view)
    decisions: list[Decision] = []
    for block in view:
        action = Action.KEEP if block in had else Action.LOAD
        if block in fixed:
            decisions.append(Decision(block, action, fixed[block], None))
        else:
            reason = Reason.SCORE if block in chosen else Reason.STILL_FITS
            decisions.append(Decision(block, action, reason, float(scores[block])))
    for block in current:
        if block not in has:
            decisions.append(
                Decision(block, Action.DROP, Reason.OUTSCORED, float(scores[block]))
            )
    return tuple(decisions)
