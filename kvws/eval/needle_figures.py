"""What answers to planted facts add up to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from kvws.eval.arms import FULL
from kvws.eval.asking import RIGHT, Answered
from kvws.eval.intervals import Estimate, ratio
from kvws.recall.recipe import AUTO

GROUPS: Mapping[str, Callable[[Answered], bool]] = {
    "all": lambda answered: True,
    "verbatim": lambda answered: answered.kind == "verbatim",
    "paraphrased": lambda answered: answered.kind == "paraphrased",
    "updated": lambda answered: answered.is_update,
    "not updated": lambda answered: not answered.is_update,
}
"""Of questions, by name."""


@dataclass(frozen=True)
class Figures:
    """How well one arm did on some questions. Shares are of the questions.

    Attributes:
        questions: how many.
        gated_questions: those that the full context answers.
        exact: share answered.
        gated_exact: share answered of those that the full context answers.
        picked: share for which the right value was likelier than its rivals.
        nll: of the right value: mean over questions, in nats a token.
        said_older: share for which an older value was likelier, of those that have one.
        recall_1, recall_3, recall_8: share whose block is among the arm's first n; None where the
            arm ranks nothing.
        reciprocal_rank: mean of 1 / rank, 0 where the block was not chosen.
        all_in_view, some_in_view: share with all, or some, of the fact's blocks in view.
    """

    questions: int
    gated_questions: int
    exact: Estimate
    gated_exact: Estimate
    picked: Estimate
    nll: Estimate
    said_older: Estimate
    recall_1: float | None
    recall_3: float | None
    recall_8: float | None
    reciprocal_rank: float | None
    all_in_view: float
    some_in_view: float


def figures(answered: Sequence[Answered]) -> Figures:
    """Of one arm at one budget; at least one answer. Facts are the units of the intervals."""
    gated = [each for each in answered if each.full_exact]
    updated = [each for each in answered if each.verdict.said_older is not None]
    count = len(answered)
    is_ranked = all(each.is_ranked for each in answered)

    def recall(n: int) -> float | None:
        found = sum(each.rank is not None and each.rank < n for each in answered)
        return found / count if is_ranked else None

    ranks = [each.rank for each in answered if each.rank is not None]
    return Figures(
        questions=count,
        gated_questions=len(gated),
        exact=_mean(answered, _exact),
        gated_exact=_mean(gated, _exact),
        picked=_mean(answered, lambda each: float(each.verdict.picked)),
        nll=_mean(answered, lambda each: each.verdict.nll),
        said_older=_mean(updated, lambda each: float(bool(each.verdict.said_older))),
        recall_1=recall(1),
        recall_3=recall(3),
        recall_8=recall(8),
        reciprocal_rank=sum(1 / (1 + rank) for rank in ranks) / count if is_ranked else None,
        all_in_view=sum(each.blocks_in_view == each.blocks for each in answered) / count,
        some_in_view=sum(each.blocks_in_view > 0 for each in answered) / count,
    )


def by_arm(answered: Sequence[Answered], group: str, percent: int) -> dict[str, Figures]:
    """Figures of every arm on a group of questions at one budget, in the order they came."""
    found: dict[str, list[Answered]] = {}
    for each in answered:
        if each.budget_percent == percent and GROUPS[group](each):
            found.setdefault(each.arm, []).append(each)
    return {arm: figures(own) for arm, own in found.items()}


def by_template(answered: Sequence[Answered], percent: int) -> dict[str, dict[str, Figures]]:
    """Figures of every arm at one budget, by form of fact."""
    templates = list(dict.fromkeys(each.template for each in answered))
    return {
        template: by_arm([each for each in answered if each.template == template], "all", percent)
        for template in templates
    }


def of_full_and_right(
    answered: Sequence[Answered], group: str, percent: int
) -> dict[str, Estimate]:
    """Exact answers of the default's views, as a share of those of each yardstick's."""
    own = [a for a in answered if a.budget_percent == percent and GROUPS[group](a)]
    tops = _by_fact([each for each in own if each.arm == AUTO], _exact)
    return {
        yardstick: _ratio(tops, _by_fact([each for each in own if each.arm == yardstick], _exact))
        for yardstick in (FULL, RIGHT)
    }


def as_json(answered: Sequence[Answered], budgets: Sequence[int]) -> dict[str, object]:
    """All of it, and every answer."""
    return {
        "figures": {
            str(percent): {
                group: {arm: asdict(of) for arm, of in by_arm(answered, group, percent).items()}
                for group in GROUPS
            }
            for percent in budgets
        },
        "exact_of_auto_by_exact_of": {
            str(percent): {
                group: {
                    yardstick: asdict(estimate)
                    for yardstick, estimate in of_full_and_right(answered, group, percent).items()
                }
                for group in GROUPS
            }
            for percent in budgets
        },
        "templates": {
            str(percent): {
                template: {arm: asdict(of) for arm, of in arms.items()}
                for template, arms in by_template(answered, percent).items()
            }
            for percent in budgets
        },
        "answers": [asdict(each) for each in answered],
    }


_Fact = tuple[str, int, int]


def _exact(answered: Answered) -> float:
    return float(answered.verdict.exact)


def _by_fact(
    answered: Sequence[Answered], of: Callable[[Answered], float]
) -> dict[_Fact, list[float]]:
    found: dict[_Fact, list[float]] = {}
    for each in answered:
        found.setdefault((each.trace, each.episode, each.needle), []).append(of(each))
    return found


def _mean(answered: Sequence[Answered], of: Callable[[Answered], float]) -> Estimate:
    found = _by_fact(answered, of).values()
    return ratio([sum(values) for values in found], [float(len(values)) for values in found])


def _ratio(tops: Mapping[_Fact, list[float]], bottoms: Mapping[_Fact, list[float]]) -> Estimate:
    facts = list(bottoms)
    return ratio([sum(tops[fact]) for fact in facts], [sum(bottoms[fact]) for fact in facts])
