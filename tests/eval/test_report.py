"""Figures over points: what is recovered, against what, and how sure it is."""

from __future__ import annotations

import json
import math

import pytest
from rich.console import Console

from kvws.eval.arms import FULL, SINK_WINDOW, SLIDING, SUMMARY, TEXT, recipes_of
from kvws.eval.drift import Drift
from kvws.eval.fidelity import Judgement, Outcome, PointResult, Settings
from kvws.eval.points import Cut
from kvws.eval.report import arms_of, budgets_of, curves_of, figures, groups_of, mean_mass
from kvws.eval.report_json import as_json
from kvws.eval.report_tables import budget_table, drift_line, groups_table, mass_table

WINDOW_KL = (0.4, 0.2, 0.05, 0.02)


def outcome(kl: float, question_kl: float | None = None) -> Outcome:
    return Outcome(Judgement(question_kl, kl, 1 - kl, kl / 2), 320, 40, 5.0, 70.0)


def result(number: int, arms: dict[str, Outcome], *, trace: str = "one") -> PointResult:
    return PointResult(
        f"{trace}@{number}",
        trace,
        f"format of {trace}",
        40,
        30,
        60,
        {25: arms},
        {"arm": {8: 0.1 * number, 16: 0.2, 32: 0.3}},
    )


def results(arm: tuple[float, ...] = (0.2, 0.1, 0.05, 0.01)) -> list[PointResult]:
    found: list[PointResult] = []
    for number, (window, kl) in enumerate(zip(WINDOW_KL, arm, strict=True)):
        arms = {
            FULL: outcome(0.0, 0.0),
            SLIDING: outcome(2 * window, 0.3),
            SINK_WINDOW: outcome(window, 0.2),
            TEXT: outcome(0.06, 0.1),
            "arm": outcome(kl, 0.05 if number else None),
        }
        found.append(result(number, arms, trace="one" if number < 2 else "two"))
    return found


def test_recovered_is_what_the_window_loses_and_the_arm_does_not() -> None:
    found = figures(results(), 25, "arm")
    assert found is not None
    assert found.recovered.value == pytest.approx(1 - 0.36 / 0.67)
    assert found.recovered_of_sliding == pytest.approx(1 - 0.36 / 1.34)
    assert found.recovered_question == pytest.approx(0.75)  # the pairs that are known
    assert found.question_kl == pytest.approx(0.05)
    assert found.against_window.value == pytest.approx(-0.31 / 4)
    assert found.turn_kl == pytest.approx(0.09) and found.top1 == pytest.approx(0.91)


def test_the_window_recovers_nothing_and_the_full_context_everything() -> None:
    window, full = (figures(results(), 25, arm) for arm in (SINK_WINDOW, FULL))
    assert window is not None and full is not None
    for value in (window.recovered.value, window.recovered.low, window.recovered.high):
        assert value == pytest.approx(0)
    assert full.recovered.value == full.recovered.low == full.recovered.high == 1


def test_intervals_are_paired() -> None:
    """Points differ a lot, but the arm loses half of what the window does at each."""
    found = figures(results(tuple(kl / 2 for kl in WINDOW_KL)), 25, "arm")
    assert found is not None
    assert found.recovered.low == pytest.approx(0.5) == found.recovered.high
    assert found.against_window.low < found.against_window.value < found.against_window.high < 0


def test_the_bootstrap_has_the_known_value_of_two_points() -> None:
    """Two points: both draws of one, of the other, or one of each, with chances ¼, ¼, ½."""
    arms = {SINK_WINDOW: outcome(1.0), SLIDING: outcome(1.0)}
    pair = [
        result(0, {**arms, "arm": outcome(0.0)}),
        result(1, {**arms, "arm": outcome(2.0)}),
    ]
    found = figures(pair, 25, "arm")
    assert found is not None
    assert (found.recovered.low, found.recovered.value, found.recovered.high) == (-1, 0, 1)
    assert (found.against_window.low, found.against_window.high) == (-1, 1)


def test_long_range_points_are_those_where_the_window_loses_much() -> None:
    found = figures(results(), 25, "arm")
    assert found is not None and found.long_range is not None
    assert found.long_range.points == 2
    assert found.long_range.recovered == pytest.approx(0.5)
    assert found.long_range.turn_kl == pytest.approx(0.15)
    near = figures(results()[2:], 25, "arm")
    assert near is not None and near.long_range is None


def test_beating_text_is_counted_per_point() -> None:
    found = figures(results(), 25, "arm")
    assert found is not None and found.long_range is not None
    assert found.beats_text == pytest.approx(0.5)
    assert found.long_range.beats_text == 0


def test_a_rare_arm_is_compared_where_it_exists() -> None:
    rare = results()
    rare[0] = result(0, {**rare[0].outcomes[25], SUMMARY: outcome(0.1, 0.1)})
    found = figures(rare, 25, SUMMARY)
    assert found is not None and found.points == 1
    assert found.recovered.value == pytest.approx(0.75)
    assert figures(rare[1:], 25, SUMMARY) is None
    assert arms_of(rare, 25)[-1] == SUMMARY
    assert f"{SUMMARY} (n=1)" in curves_of(rare)


def test_groups_curves_and_mass_are_means_of_their_members() -> None:
    found = results()
    assert budgets_of(found) == [25]
    groups = groups_of(found, lambda each: each.format)
    assert {name: len(members) for name, members in groups.items()} == {
        "format of one": 2,
        "format of two": 2,
    }
    curves = curves_of(found)
    assert FULL not in curves and curves["arm"] == [(25, pytest.approx(0.09))]
    assert mean_mass(found)["arm"][8] == pytest.approx(0.15)


def test_the_json_report_has_everything_and_no_undefined_number() -> None:
    lossless = [result(0, {SINK_WINDOW: outcome(0.0), "arm": outcome(0.0)})]
    settings = Settings((25,), recipes_of([], with_profile=True), seed=3)
    drift = {"name": "one@0", "judgement": {"turn_kl": math.nan}}
    report = as_json(
        lossless,
        [Cut("one", (), {"not drawn": 4})],
        settings,
        model={"name": "made up"},
        command=["kvws", "eval"],
        drift=[drift],
    )
    back = json.loads(json.dumps(report, allow_nan=False))
    assert back["overall"]["25"]["arm"]["recovered"]["value"] is None
    assert back["by_trace"]["one"]["25"]["arm"]["points"] == 1
    assert back["points"][0]["outcomes"]["25"]["arm"]["judgement"]["turn_kl"] == 0
    assert back["traces"] == [{"name": "one", "points": 0, "left_out": {"not drawn": 4}}]
    assert back["settings"]["seed"] == 3 and "auto" in back["settings"]["recipes"]
    assert set(back["versions"]) == {"kvws", "python", "torch", "transformers"}
    assert back["drift"][0]["judgement"]["turn_kl"] is None


def test_tables_show_every_arm_and_group() -> None:
    console = Console(width=240, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(budget_table(results(), 25, 0))
    console.print(groups_table(results(), 25, 0))
    console.print(mass_table(results()))
    judged = Judgement(None, 0.0123, 0.9, 0.0)
    console.print(drift_line([Drift("one@0", 40, 10, judged)]))
    text = console.export_text()
    for word in (FULL, SLIDING, TEXT, "arm", "format of two", "0.46", "n=2", "KL –", "0.012"):
        assert word in text, word
