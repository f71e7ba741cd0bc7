"""Sessions that our own recorder wrote, sent again: nothing is computed twice.

As `test_recorded_sessions`, for those who have no recordings of real clients.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.front import Front
from tests.acceptance.own_recordings import RecordedCall, load_recording
from tests.acceptance.record import FIXTURES, SESSIONS, record
from tests.acceptance.recorded import Resending, Sent, recorded_ids
from tests.acceptance.reuse import Kind, assert_reuse

KINDS: dict[tuple[str, int], Kind] = {
    ("coding", 1): "aside",  # title
    ("coding", 5): "summary",
    ("coding", 6): "rewrite",
    ("chat", 3): "aside",  # condenser
    ("chat", 4): "rewrite",
}


@pytest.mark.parametrize("name", SESSIONS)
def test_a_session_of_ours_computes_only_what_is_new(thinking_front: Front, name: str) -> None:
    resending, turns = Resending(thinking_front), list[Sent]()
    calls = load_recording(FIXTURES / f"{name}.jsonl")
    assert len(calls) >= 5
    for call in calls:
        kind = KINDS.get((name, call.request.number), "turn")
        assert call.is_aside == (kind in ("aside", "summary"))
        assert_reuse(resending.call(call.request, call.answer), turns, kind)


def test_the_fixtures_are_what_the_recorder_writes(smollm2: Path, tmp_path: Path) -> None:
    for name, file in record(smollm2, tmp_path).items():
        fixture = load_recording(FIXTURES / f"{name}.jsonl")
        assert told(load_recording(file)) == told(fixture), (
            "run python -m tests.acceptance.record, and look at what has changed"
        )


def told(calls: list[RecordedCall]) -> list[Any]:
    """What was recorded, with the ids of tool calls numbered: they are new in every run."""
    numbers: dict[str, str] = {}
    for call in calls:
        for call_id in recorded_ids(call.answer):
            numbers.setdefault(call_id, f"call {len(numbers)}")

    def numbered(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: numbered(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [numbered(each) for each in value]
        return numbers.get(value, value) if isinstance(value, str) else value

    return [
        (
            call.request.path,
            call.request.thread,
            numbered(call.request.body),
            numbered(call.answer),
        )
        for call in calls
    ]
