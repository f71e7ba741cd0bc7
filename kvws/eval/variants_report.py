"""What variants recover of what the window loses, and how that differs from the default."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.table import Table

from kvws.eval.fidelity import Judgement
from kvws.eval.intervals import Estimate, ratio
from kvws.eval.variants import DEFAULT, Variant
from kvws.eval.variants_measured import VariantResult


@dataclass(frozen=True)
class Recovery:
    """On the question or on the recorded turn.

    Attributes:
        recovered: 1 − ΣKL / ΣKL(sink + window).
        gain: what the default recovers less, of paired bootstrap draws over points.
    """

    recovered: float
    gain: Estimate


@dataclass(frozen=True)
class VariantFigures:
    """A variant at one budget.

    Attributes:
        loaded: share of the view that the view of the step before does not hold, mean over points.
        question: None where no question has tokens to compare.
    """

    points: int
    loaded: float
    question: Recovery | None
    turn: Recovery


def variant_figures(
    results: Sequence[VariantResult], percent: int, name: str, seed: int = 0
) -> VariantFigures:
    """Of one variant, over all points; the default is among what was measured."""
    shown = [result.shown[percent] for result in results]
    question = _recovery(results, percent, name, seed, lambda judged: judged.question_kl)
    turn = _recovery(results, percent, name, seed, lambda judged: judged.turn_kl)
    assert turn is not None
    return VariantFigures(
        points=len(results),
        loaded=float(np.mean([of_point[name].loaded for of_point in shown])),
        question=question,
        turn=turn,
    )


def _recovery(
    results: Sequence[VariantResult],
    percent: int,
    name: str,
    seed: int,
    kl_of: Callable[[Judgement], float | None],
) -> Recovery | None:
    rows = [
        (
            kl_of(result.shown[percent][name].judgement),
            kl_of(result.shown[percent][DEFAULT].judgement),
            kl_of(result.window[percent]),
        )
        for result in results
    ]
    known = np.array([row for row in rows if None not in row], dtype=np.float64).reshape(-1, 3)
    if not len(known):
        return None
    own, default, window = known.T
    gain = ratio((default - own).tolist(), window.tolist(), seed=seed)
    left = float(own.sum()) / float(window.sum()) if window.sum() else math.nan
    return Recovery(1 - left, gain)


def variants_table(
    results: Sequence[VariantResult], variants: Sequence[Variant], percent: int, seed: int
) -> Table:
    """All variants at one budget."""
    table = Table(
        title=f"Variants of the default, views of {percent} % of the history (n={len(results)})",
        header_style="bold",
        padding=(0, 1),
        box=None,
    )
    table.add_column("topic", no_wrap=True)
    table.add_column("variant", no_wrap=True)
    for column in ("question", "to the default", "turn", "to the default", "loaded"):
        table.add_column(column, justify="right", no_wrap=True)
    for variant in variants:
        found = variant_figures(results, percent, variant.name, seed)
        table.add_row(
            variant.topic,
            variant.name,
            *_cells(found.question),
            *_cells(found.turn),
            f"{found.loaded:.2f}",
        )
    table.caption = (
        "question, turn: recovered of what sink + window loses; to the default: the difference, "
        "and 95 % of paired bootstrap draws; loaded: share of the view that the view of the step "
        "before does not hold"
    )
    return table


def _cells(recovery: Recovery | None) -> tuple[str, str]:
    if recovery is None:
        return "", ""
    gain = recovery.gain
    return (
        f"{recovery.recovered:.2f}",
        f"{gain.value:+.2f} [{gain.low:+.2f}, {gain.high:+.2f}]",
    )


def variants_json(
    results: Sequence[VariantResult],
    variants: Sequence[Variant],
    budgets: Sequence[int],
    seed: int,
) -> dict[str, Any]:
    """Everything that was measured, per point and in sum."""
    return {
        "variants": [asdict(variant) for variant in variants],
        "figures": {
            str(percent): {
                variant.name: asdict(variant_figures(results, percent, variant.name, seed))
                for variant in variants
            }
            for percent in budgets
        },
        "points": [asdict(result) for result in results],
    }
