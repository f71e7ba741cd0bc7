"""The recorded session that the project ships."""

from __future__ import annotations

import re
from pathlib import Path

from kvws.replay.loaders import load_trace

TRACE = Path(__file__).resolve().parents[2] / "traces" / "step-summary.traj.json"


def test_it_loads_as_one_long_session() -> None:
    trace = load_trace(TRACE)
    assert trace.format == "mini-swe-agent"
    assert len(trace.steps) == 18 and set(trace.threads) == {"main"}
    characters = sum(len(message.content) for message in trace.threads["main"])
    assert characters > 4 * 3 * 2048  # three characters a token: four budgets of the demo


def test_it_tells_nothing_about_who_recorded_it() -> None:
    text = TRACE.read_text(encoding="utf-8")
    assert not re.search(r"[\w.+-]+@[\w-]+\.\w+", text)
    assert not re.search(r"/(home|root|Users|work|tmp)/", text)
