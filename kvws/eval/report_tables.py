"""The figures of a fidelity run as tables."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rich.table import Table

from kvws.eval.drift import BUDGET_PERCENT, Drift
from kvws.eval.fidelity import MASS_DEPTHS, PointResult
from kvws.eval.intervals import Estimate
from kvws.eval.report import (
    LONG_RANGE_KL,
    ArmFigures,
    arms_of,
    figures,
    groups_of,
    mean_mass,
)

_COLUMNS = (
    *("KL question", "KL turn", "to window", "recovered", "question", "of sliding", "top-1"),
    *("ΔNLL", "far KL", "far rec.", "> text", "far > text", "context", "computed"),
    *("choose", "read"),
)


def budget_table(results: Sequence[PointResult], percent: int, seed: int) -> Table:
    """All arms at one budget, over all points."""
    table = _table(f"Views of {percent} % of the history (n={len(results)})")
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    far = 0
    for arm in arms_of(results, percent):
        found = figures(results, percent, arm, seed)
        if found is None:
            continue
        far = max(far, found.long_range.points if found.long_range else 0)
        name = arm if found.points == len(results) else f"{arm} (n={found.points})"
        table.add_row(name, *_cells(found))
    table.caption = (
        "KL(full ‖ view) per token in nats; to window: mean difference of KL turn to sink + "
        "window; recovered: of what that loses, on turn and question, and of what the sliding "
        f"window loses; far: the {far} long-range steps, where sink + window loses more than "
        f"{LONG_RANGE_KL}; > text: share of steps better than the same blocks as text; context "
        "and computed in tokens; choose and read in ms; ± 95 % of paired bootstrap draws"
    )
    return table


def groups_table(results: Sequence[PointResult], percent: int, seed: int) -> Table:
    """What each arm recovers, by trace format and by trace, at one budget."""
    table = _table(f"Recovered on the recorded turn at {percent} %, by format and by trace")
    groups = groups_of(results, lambda result: result.format)
    for name, of_trace in groups_of(results, lambda result: result.trace).items():
        groups.setdefault(name, of_trace)
    for name, members in groups.items():
        table.add_column(f"{name}\nn={len(members)}", justify="right")
    for arm in arms_of(results, percent):
        cells: list[str] = []
        for members in groups.values():
            found = figures(members, percent, arm, seed)
            cells.append("" if found is None else f"{found.recovered.value:.2f}")
        table.add_row(arm, *cells)
    return table


def mass_table(results: Sequence[PointResult]) -> Table:
    """How much attention mass the first blocks of each order hold."""
    table = _table("Attention mass of the competing blocks held by the first of each order")
    for depth in MASS_DEPTHS:
        table.add_column(f"{depth} blocks", justify="right")
    for name, shares in mean_mass(results).items():
        table.add_row(name, *(f"{shares[depth]:.2f}" for depth in MASS_DEPTHS))
    return table


def drift_line(drifts: Sequence[Drift]) -> str:
    """What it costs that a history was read behind views, in one sentence."""
    judged = [drift.judgement for drift in drifts]
    on_question = [each.question_kl for each in judged if each.question_kl is not None]
    question = f"{fmean(on_question):.3f}" if on_question else "–"
    turn, top1 = fmean(each.turn_kl for each in judged), fmean(each.top1 for each in judged)
    return (
        f"drift: KV that was computed behind views of {BUDGET_PERCENT} %, seen whole, costs KL "
        f"{question} on the question, {turn:.3f} on the recorded turn (top-1 {top1:.3f}), "
        f"mean of {len(drifts)}"
    )


def _table(title: str) -> Table:
    table = Table(title=title, header_style="bold", padding=(0, 1), box=None)
    table.add_column("arm", no_wrap=True)
    return table


def _cells(found: ArmFigures) -> list[str]:
    far = found.long_range
    return [
        _number(found.question_kl, 3),
        _number(found.turn_kl, 3),
        _with_interval(found.against_window, 3),
        _with_interval(found.recovered, 2),
        _number(found.recovered_question, 2),
        _number(found.recovered_of_sliding, 2),
        _number(found.top1, 3),
        _number(found.nll_delta, 3),
        _number(far.turn_kl if far else None, 3),
        _number(far.recovered if far else None, 2),
        _number(found.beats_text, 2),
        _number(far.beats_text if far else None, 2),
        f"{found.context_tokens:.0f}",
        f"{found.computed_tokens:.0f}",
        f"{found.choose_ms:.0f}",
        f"{found.read_ms:.0f}",
    ]


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _with_interval(estimate: Estimate, digits: int) -> str:
    half = (estimate.high - estimate.low) / 2
    return f"{estimate.value:.{digits}f} ±{half:.{digits}f}"
