"""SWE-agent trajectories: the history, or what the steps tell of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvws.chat.message import Message, ToolCall
from kvws.replay.loaders import parse_trace
from kvws.replay.trace import Trace, TraceStep

CALL: dict[str, Any] = {
    "id": "c1",
    "type": "function",
    "function": {"name": "bash", "arguments": '{"c": 1}'},
}
SYSTEM: dict[str, Any] = {"role": "system", "content": "You have a shell.", "agent": "main"}
ISSUE: dict[str, Any] = {
    "role": "user",
    "content": "Fix it.",
    "agent": "main",
    "message_type": "observation",
}
TURN: dict[str, Any] = {
    "role": "assistant",
    "content": "Look.\n```\nls\n```",
    "thought": "Look.",
    "action": "ls",
    "agent": "main",
}
OUTPUT: dict[str, Any] = {"role": "user", "content": "a.py", "agent": "main"}
STEP: dict[str, Any] = {
    "action": "ls\n",
    "observation": "a.py",
    "response": TURN["content"],
    "thought": "Look.",
}


def parse(history: Any, trajectory: Any = ()) -> Trace:
    fields: dict[str, Any] = {
        "environment": "main",
        "trajectory": trajectory,
        "history": history,
        "info": {},
    }
    return parse_trace(json.dumps(fields).encode())


def contents(trace: Trace, thread: str = "main") -> list[str]:
    return [message.content for message in trace.threads[thread]]


def test_a_history_with_text_actions() -> None:
    trace = parse([SYSTEM, ISSUE, TURN, OUTPUT, TURN], [STEP, STEP])
    assert trace.format == "swe-agent"
    roles = [message.role for message in trace.threads["main"]]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert contents(trace)[2] == "Look.\n```\nls\n```"
    assert trace.steps == (TraceStep("main", 2), TraceStep("main", 4))
    assert trace.notes == ()


def test_a_history_with_tool_calls() -> None:
    turn = {**TURN, "content": "Look.", "tool_calls": [CALL], "message_type": "action"}
    result = {**OUTPUT, "role": "tool", "tool_call_ids": ["c1"]}
    trace = parse([SYSTEM, ISSUE, turn, result], [STEP])
    assert trace.threads["main"][2:] == (
        Message("assistant", "Look.", (ToolCall("c1", "bash", '{"c": 1}'),)),
        Message("tool", "a.py", name="bash", tool_call_id="c1"),
    )
    assert trace.steps == (TraceStep("main", 2),)


def test_content_may_come_in_parts() -> None:
    parts = [{"type": "text", "text": "Fix it.", "cache_control": {"type": "ephemeral"}}]
    assert contents(parse([{**ISSUE, "content": parts}, TURN]))[0] == "Fix it."


def test_demonstrations_are_context_and_no_steps() -> None:
    told = {"role": "user", "content": "A demonstration: …", "agent": "main", "is_demo": True}
    shown = {**TURN, "is_demo": True}
    trace = parse([SYSTEM, told, shown, ISSUE, TURN])
    assert contents(trace)[1:3] == ["A demonstration: …", "Look.\n```\nls\n```"]
    assert trace.steps == (TraceStep("main", 4),)


def test_each_agent_has_a_thread() -> None:
    def by(agent: str, entry: dict[str, Any]) -> dict[str, Any]:
        return {**entry, "agent": agent}

    unnamed = {"role": "user", "content": "More."}
    trace = parse(
        [
            *(by("primary", ISSUE), by("primary", TURN)),
            *(by("locate", ISSUE), unnamed, by("locate", TURN)),
            *(by("primary", OUTPUT), by("primary", TURN)),
        ]
    )
    assert contents(trace, "agent-1")[:2] == ["Fix it.", "More."]
    assert trace.steps == (TraceStep("main", 1), TraceStep("agent-1", 2), TraceStep("main", 3))


def test_turns_that_say_and_call_nothing_are_left_out() -> None:
    trace = parse([ISSUE, {**TURN, "content": ""}, {"role": "nobody"}, 7, TURN])
    assert contents(trace) == ["Fix it.", "Look.\n```\nls\n```"]
    assert trace.notes == ("empty turns skipped: 1", "entries without a known role skipped: 2")


@pytest.mark.parametrize("key", ["messages", "query"])
@pytest.mark.parametrize("history", [None, []])
def test_without_a_history_the_steps_are_read(key: str, history: Any) -> None:
    trace = parse(history, [{**STEP, key: [SYSTEM, ISSUE, TURN, OUTPUT]}, STEP])
    turn = TURN["content"]
    assert trace.format == "swe-agent"
    assert contents(trace) == ["You have a shell.", "Fix it.", turn, "a.py", turn, "a.py"]
    assert trace.steps == (TraceStep("main", 2), TraceStep("main", 4))
    assert trace.notes == ("histories missing, rebuilt from the trajectory: 1",)


def test_a_step_without_a_prompt_before_it_is_context() -> None:
    trace = parse(None, [STEP, STEP])
    assert [message.role for message in trace.threads["main"]] == ["assistant", "user"] * 2
    assert trace.steps == (TraceStep("main", 2),)


def test_an_action_beside_its_response_is_added_to_it() -> None:
    step = {"action": "ls", "observation": "a.py", "response": "Look."}
    silent = {"action": "ls", "observation": "a.py", "response": None}
    nothing = {"action": "", "observation": "a.py", "response": ""}
    trace = parse(None, [step, silent, nothing])
    assert contents(trace)[0::2] == ["Look.\n\n```\nls\n```", "```\nls\n```"]
    assert "empty turns skipped: 1" in trace.notes
