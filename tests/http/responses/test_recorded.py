"""What Codex sent in a recorded session."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvws.chat.call import ModelCall
from kvws.chat.message import ToolCall
from kvws.http.responses import RESPONSES


@pytest.fixture(scope="module")
def calls() -> list[ModelCall]:
    beside_repository = Path(__file__).resolve().parents[4] / "shared" / "harness"
    folder = Path(os.environ.get("KVWS_HARNESS") or beside_repository)
    if not folder.is_dir():
        pytest.skip("no recorded harness traffic: set KVWS_HARNESS to its folder")
    session = json.loads((folder / "codex.json").read_text(encoding="utf-8"))

    def resolved(value: Any) -> Any:
        if isinstance(value, dict) and "$ref" in value:
            return session["shared"][value["$ref"]]
        if isinstance(value, dict):
            return {key: resolved(item) for key, item in value.items()}
        return [resolved(item) for item in value] if isinstance(value, list) else value

    return [RESPONSES.read(resolved(request["body"])) for request in session["requests"]]


def test_each_request_goes_on_where_the_last_one_ended(calls: list[ModelCall]) -> None:
    first, second = (call.messages for call in calls)
    assert second[: len(first)] == first
    turn, answer = second[len(first) :]
    assert turn.tool_calls == (ToolCall("call_1", "exec_command", '{"cmd":"ls"}'),)
    assert (answer.tool_call_id, answer.name) == ("call_1", "exec_command")


def test_the_tools_stay_the_same_and_only_web_search_is_missing(calls: list[ModelCall]) -> None:
    first, second = calls
    assert first.tools == second.tools
    names = [tool["function"]["name"] for tool in first.tools]
    assert "exec_command" in names and "multi_agent_v1__spawn_agent" in names
    assert first.dropped == ("tool of type web_search",)


def test_turns_are_no_side_calls_and_are_streamed(calls: list[ModelCall]) -> None:
    assert [(call.side_call, call.stream) for call in calls] == [(False, True)] * 2
