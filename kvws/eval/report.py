"""From results per point to figures: what is recovered, how sure that is, and where.

The yardstick is `sink + window`, which takes no retrieval at all. An arm recovers

    1 − ΣKL(arm) / ΣKL(sink + window)

of what the window loses, on the recorded turns: 1 is the full context, 0 the window, below 0 worse
than the window. Intervals are of 1,000 paired bootstrap draws over points.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvws.eval.arms import FULL, SINK_WINDOW, SLIDING, TEXT
from kvws.eval.fidelity import MASS_DEPTHS, Outcome, PointResult
from kvws.eval.intervals import Estimate, ratio

LONG_RANGE_KL = 0.1
"""A step is long-range where the window loses more than this: what it needs is further back."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LongRange:
    """The points where the window loses much.

    Attributes:
        beats_text: share of them where the arm's KL is below that of BM25's text; None where
            there is no such arm.
    """

    points: int
    turn_kl: float
    recovered: float
    beats_text: float | None


@dataclass(frozen=True)
class ArmFigures:
    """An arm at one budget over some points; of those it exists at.

    Attributes:
        question_kl, turn_kl, top1, nll_delta: means over points, as in `Judgement`.
        against_window: mean difference of the turn's KL to `sink + window`; below 0 is better.
        recovered: on the recorded turn.
        recovered_question: on the question.
        recovered_of_sliding: on the recorded turn, against the plain sliding window.
        beats_text: share of the points where the turn's KL is below that of BM25's text.
        long_range: None where there is no such point.
    """

    points: int
    question_kl: float | None
    turn_kl: float
    top1: float
    nll_delta: float
    against_window: Estimate
    recovered: Estimate
    recovered_question: float | None
    recovered_of_sliding: float | None
    beats_text: float | None
    long_range: LongRange | None
    context_tokens: float
    computed_tokens: float
    choose_ms: float
    read_ms: float


def budgets_of(results: Sequence[PointResult]) -> list[int]:
    return sorted({percent for result in results for percent in result.outcomes})


def arms_of(results: Sequence[PointResult], percent: int) -> list[str]:
    """In the order in which they come up."""
    names = [name for result in results for name in result.outcomes.get(percent, ())]
    return list(dict.fromkeys(names))


def figures(
    results: Sequence[PointResult], percent: int, arm: str, seed: int = 0
) -> ArmFigures | None:
    """An arm's figures at one budget; None where no point has it."""
    tested = [result.outcomes[percent] for result in results if arm in result.outcomes[percent]]
    if not tested:
        return None
    own = [outcomes[arm] for outcomes in tested]
    kl, window = _turn_kl(own), _turn_kl([outcomes[SINK_WINDOW] for outcomes in tested])
    sliding = [outcomes[SLIDING] for outcomes in tested if SLIDING in outcomes]
    text = _turn_kl([outcomes[TEXT] for outcomes in tested]) if TEXT in tested[0] else None
    on_question = _paired_question_kl(tested, arm)
    against, recovered = against_window(kl, window, seed)
    return ArmFigures(
        points=len(tested),
        question_kl=float(on_question[0].mean()) if on_question[0].size else None,
        turn_kl=float(kl.mean()),
        top1=_mean(own, lambda outcome: outcome.judgement.top1),
        nll_delta=_mean(own, lambda outcome: outcome.judgement.nll_delta),
        against_window=against,
        recovered=recovered,
        recovered_question=_recovered(*on_question) if on_question[0].size else None,
        recovered_of_sliding=_recovered(kl, _turn_kl(sliding)) if sliding else None,
        beats_text=None if text is None else float((kl < text).mean()),
        long_range=_long_range(kl, window, text),
        context_tokens=_mean(own, lambda outcome: outcome.context_tokens),
        computed_tokens=_mean(own, lambda outcome: outcome.computed_tokens),
        choose_ms=_mean(own, lambda outcome: outcome.choose_ms),
        read_ms=_mean(own, lambda outcome: outcome.read_ms),
    )


def against_window(kl: Floats, window: Floats, seed: int) -> tuple[Estimate, Estimate]:
    """Mean difference to the window, and recovered fraction.

    Args:
        kl, window: [points], of the same points.
    """
    left = ratio(kl.tolist(), window.tolist(), seed=seed)
    return (
        ratio((kl - window).tolist(), [1.0] * len(kl), seed=seed),
        Estimate(1 - left.value, 1 - left.high, 1 - left.low),
    )


def groups_of(
    results: Sequence[PointResult], key: Callable[[PointResult], str]
) -> dict[str, list[PointResult]]:
    """Results by format or by trace, in the order in which those come up."""
    groups: dict[str, list[PointResult]] = {}
    for result in results:
        groups.setdefault(key(result), []).append(result)
    return groups


def curves_of(results: Sequence[PointResult]) -> dict[str, list[tuple[float, float]]]:
    """By arm: (budget in percent, mean KL of the recorded turn). Without the full context, whose
    KL is nothing but rounding; an arm that not every point has is marked with their number."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for percent in budgets_of(results):
        for arm in arms_of(results, percent):
            tested = [r.outcomes[percent][arm] for r in results if arm in r.outcomes[percent]]
            name = arm if len(tested) == len(results) else f"{arm} (n={len(tested)})"
            if arm != FULL:
                curves.setdefault(name, []).append((percent, float(_turn_kl(tested).mean())))
    return curves


def mean_mass(results: Sequence[PointResult]) -> dict[str, dict[int, float]]:
    """By arm and depth, the mean share of attention mass that its first blocks hold."""
    names = dict.fromkeys(name for result in results for name in result.mass)
    return {
        name: {
            depth: float(np.mean([r.mass[name][depth] for r in results if name in r.mass]))
            for depth in MASS_DEPTHS
        }
        for name in names
    }


def _turn_kl(outcomes: Sequence[Outcome]) -> Floats:
    return np.array([outcome.judgement.turn_kl for outcome in outcomes])


def _paired_question_kl(
    tested: Sequence[Mapping[str, Outcome]], arm: str
) -> tuple[Floats, Floats]:
    """Of an arm and of the window, where the question has tokens to compare."""
    pairs = [
        (outcomes[arm].judgement.question_kl, outcomes[SINK_WINDOW].judgement.question_kl)
        for outcomes in tested
    ]
    known = np.array([pair for pair in pairs if None not in pair], dtype=np.float64).reshape(-1, 2)
    return known[:, 0], known[:, 1]


def _recovered(kl: Floats, window: Floats) -> float:
    """NaN where the window loses nothing."""
    lost = float(window.sum())
    return 1 - float(kl.sum()) / lost if lost else float("nan")


def _long_range(kl: Floats, window: Floats, text: Floats | None) -> LongRange | None:
    far = window > LONG_RANGE_KL
    if not far.any():
        return None
    return LongRange(
        points=int(far.sum()),
        turn_kl=float(kl[far].mean()),
        recovered=_recovered(kl[far], window[far]),
        beats_text=None if text is None else float((kl < text)[far].mean()),
    )


def _mean(outcomes: Sequence[Outcome], of: Callable[[Outcome], float]) -> float:
    return float(np.mean([of(outcome) for outcome in outcomes]))
