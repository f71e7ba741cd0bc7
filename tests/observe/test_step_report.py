"""A step's report, as plain data and back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvws.observe.step_report import StepReport, report_from_plain, report_to_plain
from kvws.recall.plan import Action, Decision
from kvws.recall.recipe import SignalName
from kvws.recall.regions import Reason

LEXICAL, CONTENT = SignalName.LEXICAL, SignalName.CONTENT

REPORT = StepReport(
    "main",
    recalled=True,
    decisions=(
        Decision(0, Action.KEEP, Reason.SINK),
        Decision(3, Action.LOAD, Reason.ANCHOR, 0.25, CONTENT, {CONTENT: 0, LEXICAL: 4}),
        Decision(4, Action.LOAD, Reason.NEIGHBOUR, 0.125, None, {LEXICAL: 9}),
        Decision(2, Action.DROP, Reason.OUTSCORED),
    ),
    signals=("content", "lexical"),
)


def of_decisions(*decisions: Any) -> StepReport:
    return report_from_plain({**report_to_plain(StepReport("main")), "decisions": decisions})


def test_a_report_survives_json_with_ranks_and_signals() -> None:
    plain = json.loads(json.dumps(report_to_plain(REPORT)))
    again = report_from_plain(plain)
    assert again == REPORT
    assert again.decisions[1].signal is CONTENT
    assert list(again.decisions[1].ranks) == [CONTENT, LEXICAL]


def test_a_decision_is_told_with_its_signal_and_ranks_behind_its_score() -> None:
    plain = report_to_plain(REPORT)
    assert plain["decisions"][0] == [0, "keep", "sink", None, None, {}]
    assert plain["decisions"][1] == [
        3, "load", "hit", 0.25, "content", {"content": 0, "lexical": 4}
    ]  # fmt: skip
    assert plain["signals"] == ["content", "lexical"]


def test_a_report_of_before_there_were_signals_is_read() -> None:
    plain = report_to_plain(REPORT)
    plain["decisions"] = [each[:4] for each in plain["decisions"]]
    del plain["signals"]
    again = report_from_plain(plain)
    assert again.signals == ()
    assert again.decisions[1] == Decision(3, Action.LOAD, Reason.ANCHOR, 0.25)


@pytest.mark.parametrize(
    "decision",
    [
        [0, "keep", "sink"],
        [0, "keep", "sink", None, None, {}, "more"],
        [0, "keep", "because", None],
        [0, "keep", "score", 0.5, "gut-feeling", {}],
        [0, "keep", "score", 0.5, "lexical", {"gut-feeling": 0}],
        [0, "keep", "score", 0.5, "lexical", {"lexical": "first"}],
        [0, "keep", "score", 0.5, "lexical", [0]],
        7,
    ],
)
def test_what_is_no_decision_is_refused(decision: Any) -> None:
    of_decisions([0, "keep", "score", 0.5, "lexical", {"lexical": 0}])
    with pytest.raises((ValueError, TypeError, AttributeError)):
        of_decisions(decision)


def test_what_is_no_signal_is_refused() -> None:
    with pytest.raises(ValueError, match="gut-feeling"):
        report_from_plain({**report_to_plain(REPORT), "signals": ["gut-feeling"]})
