"""What views held of what recorded agents looked back at, added up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from kvws.eval.agent_native import Found, Want
from kvws.eval.intervals import Estimate, ratio

WANTS: tuple[Want, ...] = ("copied", "read again")


@dataclass(frozen=True)
class Figures:
    """How much one arm's views held. Steps are the units of the intervals.

    Attributes:
        steps: with something at stake.
        beyond_compaction: of those, with copies that only stand before a compaction.
        spans: at stake.
        spans_in_view: share of them with a whole copy in view.
        blocks_in_view: share of their blocks.
        steps_served: share of the steps with all of it in view.
    """

    steps: int
    beyond_compaction: int
    spans: int
    spans_in_view: Estimate
    blocks_in_view: Estimate
    steps_served: Estimate


def figures(found: Sequence[Found]) -> Figures:
    """Of one arm at one budget, for one want."""
    spans = [float(each.spans) for each in found]
    return Figures(
        steps=len(found),
        beyond_compaction=sum(each.is_beyond_compaction for each in found),
        spans=sum(each.spans for each in found),
        spans_in_view=ratio([float(each.spans_in_view) for each in found], spans),
        blocks_in_view=ratio(
            [float(each.blocks_in_view) for each in found], [float(each.blocks) for each in found]
        ),
        steps_served=ratio(
            [float(each.spans_in_view == each.spans) for each in found], [1.0] * len(found)
        ),
    )


def by_arm(found: Sequence[Found], want: Want, percent: int) -> dict[str, Figures]:
    """Figures of every arm at one budget, in the order they came."""
    of_arm: dict[str, list[Found]] = {}
    for each in found:
        if each.want == want and each.budget_percent == percent:
            of_arm.setdefault(each.arm, []).append(each)
    return {arm: figures(own) for arm, own in of_arm.items()}


def as_json(found: Sequence[Found], budgets: Sequence[int]) -> dict[str, object]:
    """All of it, by budget, want, and "all" or the format of the recording; and every step."""
    formats = list(dict.fromkeys(each.format for each in found))
    groups = {"all": list(found)} | {
        name: [each for each in found if each.format == name] for name in formats
    }
    return {
        "figures": {
            str(percent): {
                want: {
                    group: {arm: asdict(of) for arm, of in by_arm(own, want, percent).items()}
                    for group, own in groups.items()
                }
                for want in WANTS
            }
            for percent in budgets
        },
        "steps": [asdict(each) for each in found],
    }
