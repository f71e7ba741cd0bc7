"""The report of a fidelity run as JSON: enough to draw every figure again, and to run it again."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any, cast

from kvws import __version__
from kvws.eval.fidelity import PointResult, Settings
from kvws.eval.points import Cut
from kvws.eval.report import arms_of, budgets_of, figures, groups_of, mean_mass


def versions() -> dict[str, str]:
    """Of what computed the figures."""
    return {
        "kvws": __version__,
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def as_json(
    results: Sequence[PointResult],
    cuts: Sequence[Cut],
    settings: Settings,
    *,
    model: Mapping[str, Any],
    command: Sequence[str],
    drift: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Everything that was measured, per point and in sum. KL in nats per token, times in
    milliseconds. A figure that is not defined is null.

    Args:
        model: name, identity and profile.
    """
    by_format = groups_of(results, lambda result: result.format)
    by_trace = groups_of(results, lambda result: result.trace)
    report = {
        "command": list(command),
        "model": dict(model),
        "versions": versions(),
        "settings": {
            "budgets": list(settings.budgets),
            "seed": settings.seed,
            "recipes": {name: asdict(recipe) for name, recipe in settings.recipes.items()},
        },
        "traces": [
            {"name": cut.trace, "points": cut.points, "left_out": dict(cut.left_out)}
            for cut in cuts
        ],
        "overall": _figures(results, settings.seed),
        "by_format": {k: _figures(v, settings.seed) for k, v in by_format.items()},
        "by_trace": {k: _figures(v, settings.seed) for k, v in by_trace.items()},
        "mass": mean_mass(results),
        "drift": list(drift),
        "points": [asdict(result) for result in results],
    }
    return cast("dict[str, Any]", _defined(report))


def _figures(results: Sequence[PointResult], seed: int) -> dict[int, dict[str, Any]]:
    """By budget and arm."""
    found: dict[int, dict[str, Any]] = {}
    for percent in budgets_of(results):
        arms = {arm: figures(results, percent, arm, seed) for arm in arms_of(results, percent)}
        found[percent] = {arm: asdict(of_arm) for arm, of_arm in arms.items() if of_arm}
    return found


def _defined(value: object) -> object:
    """The same with null for what JSON cannot say."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value).items()
        return {key: _defined(entry) for key, entry in items}
    if isinstance(value, list | tuple):
        return [_defined(entry) for entry in cast("Sequence[object]", value)]
    return value
