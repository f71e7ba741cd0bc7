"""Which blocks the next execution view keeps, loads and drops. A pure decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Why a block is in the view, or left it."""

    SINK = "sink"
    RECENT = "recent"
    SCORE = "score"
    STILL_FITS = "still fits"
    OUTSCORED = "outscored"


class Action(StrEnum):
    """What happens to a block between the current view and the next."""

    KEEP = "keep"
    LOAD = "load"
    DROP = "drop"


@dataclass(frozen=True)
class Decision:
    """One block's fate. `score` is None for blocks that did not compete."""

    block: int
    action: Action
    reason: Reason
    score: float | None


@dataclass(frozen=True)
class Regions:
    """The blocks of a thread that are in every view: its first and its newest.

    Attributes:
        sink: oldest first.
        recent: oldest first; disjoint from `sink`.
    """

    sink: tuple[int, ...]
    recent: tuple[int, ...]

    @classmethod
    def of_line(cls, line: Sequence[int], sink_blocks: int, recent_blocks: int) -> Regions:
        """Split a line longer than sink + recent into its fixed regions."""
        sink = tuple(line[:sink_blocks])
        rest = line[sink_blocks:]
        return cls(sink, tuple(rest[max(0, len(rest) - recent_blocks) :]))

    def competes(self, block_count: int) -> bytearray:
        """One byte per block of the workspace: 1 for candidates, 0 for sink and recent."""
        mask = bytearray(b"\x01") * block_count
        for block in (*self.sink, *self.recent):
            mask[block] = 0
        return mask


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
    candidates: Sequence[int],
    scores: Sequence[float],
    budget_blocks: int,
    room_blocks: int,
) -> Plan:
    """Fill the budget: sink and recent first, then the best-scored candidates (KVMem, selection).

    Ties go to the newer block. When the current view already holds every selected block and still
    fits the room, it is kept whole: a superset costs nothing, a new view costs a prefill.

    Args:
        current: blocks of the view the query was probed on, in view order.
        regions: blocks that are in every view.
        candidates: block numbers that competed.
        scores: by block number, at least as long as the largest candidate.
        budget_blocks: size of a freshly selected view.
        room_blocks: blocks that fit beside query and generation; at least `budget_blocks`.
    """
    room_for_scored = max(0, budget_blocks - len(regions.sink) - len(regions.recent))
    ranked = sorted(candidates, key=lambda block: (-scores[block], -block))
    chosen = ranked[:room_for_scored]
    view = (*regions.sink, *sorted(chosen), *regions.recent)
    if set(view) <= set(current) and len(current) <= room_blocks:
        view = tuple(current)
    return Plan(
        view=view,
        decisions=_decide(tuple(current), view, regions, set(chosen), scores),
        unchanged=view == tuple(current),
        near_misses=tuple(
            block
            for block in ranked[room_for_scored : room_for_scored + budget_blocks // 4]
            if block not in view
        ),
    )


def _decide(
    current: tuple[int, ...],
    view: tuple[int, ...],
    regions: Regions,
    chosen: set[int],
    scores: Sequence[float],
) -> tuple[Decision, ...]:
    fixed = dict.fromkeys(regions.sink, Reason.SINK) | dict.fromkeys(regions.recent, Reason.RECENT)
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
