"""Bootstrap intervals of ratios and means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_DRAWS = 1000
_TAILS_PERCENT = (2.5, 97.5)


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval; NaN where there is nothing to divide by."""

    value: float
    low: float
    high: float


def ratio(tops: Sequence[float], bottoms: Sequence[float], *, seed: int = 0) -> Estimate:
    """Sum of `tops` over sum of `bottoms`, both by unit.

    Units are what is drawn again: facts or steps, whose own figures depend on each other. A mean
    is a ratio whose bottoms are counts. Draws whose bottoms are all zero are left out.
    """
    above, below = np.asarray(tops, dtype=float), np.asarray(bottoms, dtype=float)
    if not below.sum():
        return Estimate(float("nan"), float("nan"), float("nan"))
    drawn = np.random.default_rng(seed).integers(0, len(above), (_DRAWS, len(above)))
    sums_above, sums_below = above[drawn].sum(axis=1), below[drawn].sum(axis=1)
    some = sums_below > 0
    low, high = np.percentile(sums_above[some] / sums_below[some], _TAILS_PERCENT)
    return Estimate(float(above.sum() / below.sum()), float(low), float(high))
