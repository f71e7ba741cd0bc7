"""mini-swe-agent trajectories and OpenAI-style chat logs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvws.chat.message import Message, ToolCall
from kvws.replay.loaders import parse_trace
from kvws.replay.trace import Trace, TraceStep

CALL = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"c": 1}'}}
TOOL = {"type": "function", "function": {"name": "bash", "parameters": {}}}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "List."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "a b", "tool_call_id": "c1"},
    {"role": "assistant", "content": "a and b."},
]


def parse(value: Any) -> Trace:
    return parse_trace(json.dumps(value).encode())


def contents(trace: Trace, thread: str = "main") -> list[str]:
    return [message.content for message in trace.threads[thread]]


def test_a_trajectory_with_text_actions() -> None:
    messages = [
        {"role": "system", "content": "You have a shell."},
        {"role": "user", "content": "Fix it."},
        {"role": "assistant", "content": "```bash\nls\n```", "extra": {"response": {}}},
        {"role": "user", "content": "<output>a</output>"},
        {"role": "assistant", "content": "```bash\nexit\n```"},
        {"role": "user", "content": "submitted"},
    ]
    trace = parse({"info": {"mini_version": "1.15.0"}, "messages": messages})
    assert trace.format == "mini-swe-agent"
    assert contents(trace) == [message["content"] for message in messages]
    assert trace.steps == (TraceStep("main", 2), TraceStep("main", 4))


def test_a_trajectory_with_tool_calls_and_an_exit_entry() -> None:
    messages = [*TALK, {"role": "exit", "content": "done", "extra": {}}]
    trace = parse({"trajectory_format": "mini-swe-agent-1.1", "info": {}, "messages": messages})
    assert trace.format == "mini-swe-agent"
    assert [message.role for message in trace.threads["main"]] == [m["role"] for m in TALK]
    assert trace.notes == ("entries without a known role skipped: 1",)


def test_a_chat_log_with_tool_calls() -> None:
    trace = parse({"messages": TALK, "tools": [TOOL]})
    assert trace.format == "openai-chat"
    assert trace.threads["main"][2:4] == (
        Message("assistant", "", (ToolCall("c1", "bash", '{"c": 1}'),)),
        Message("tool", "a b", name="bash", tool_call_id="c1"),
    )
    assert trace.tools == (TOOL,)
    assert trace.steps == (TraceStep("main", 2), TraceStep("main", 4))


def test_the_recorded_response_ends_the_thread() -> None:
    reply = {"role": "assistant", "content": "Anything else?", "tool_calls": [CALL]}
    trace = parse({"messages": TALK[:2], "response": {"choices": [{"message": reply}]}})
    assert contents(trace)[-1] == "Anything else?"
    assert trace.steps == (TraceStep("main", 2),)


def test_content_may_come_in_parts() -> None:
    parts = [
        {"type": "text", "text": "Look:"},
        {"type": "image_url", "image_url": {"url": "data:…"}},
        "plain",
    ]
    trace = parse({"messages": [{"role": "user", "content": parts}, TALK[-1]]})
    assert contents(trace)[0] == "Look:\n[image]\nplain"
    assert trace.notes == ("image blocks replaced by placeholders: 1",)


def test_messages_before_tool_calls_were_spelled_out_are_preferred() -> None:
    spelled = [{"role": "user", "content": "List. You may call: …"}]
    trace = parse({"messages": spelled, "raw_messages": TALK})
    assert contents(trace)[1] == "List."


def test_each_record_of_a_list_is_a_thread() -> None:
    other = [{"role": "user", "content": "Other."}, {"role": "assistant", "content": "Yes."}]
    trace = parse([{"task_id": 1, "traj": TALK}, {"task_id": 2, "traj": other}])
    assert list(trace.threads) == ["conversation-1", "conversation-2"]
    assert contents(trace, "conversation-2") == ["Other.", "Yes."]
    assert [step.thread[-1] for step in trace.steps] == ["1", "1", "2"]


def test_a_record_that_goes_on_from_the_one_before_is_the_same_thread() -> None:
    def reply(message: dict[str, Any]) -> dict[str, Any]:
        return {"choices": [{"message": message}]}

    first = {"messages": TALK[:2], "response": reply(TALK[2])}
    second = {"messages": TALK[:4], "response": reply(TALK[4])}
    lines = f"{json.dumps(first)}\n{json.dumps(second)}\n"
    trace = parse_trace(lines.encode())
    assert list(trace.threads) == ["main"]
    assert trace.steps == (TraceStep("main", 2), TraceStep("main", 4))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ({"name": "f", "arguments": {"a": "ü"}}, ToolCall("", "f", '{"a": "ü"}')),
        ({"name": "f", "arguments": "not JSON"}, ToolCall("", "f", "not JSON")),
        ({"name": "f"}, ToolCall("", "f", "{}")),
        ({}, ToolCall("", "", "{}")),
        (None, ToolCall("", "", "{}")),
    ],
)
def test_calls_of_any_shape_are_read(function: Any, expected: ToolCall) -> None:
    turn = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    trace = parse({"messages": [TALK[1], turn]})
    assert trace.threads["main"][1].tool_calls == (expected,)


def test_old_function_calls_are_read() -> None:
    call = {"name": "f", "arguments": "{}"}
    messages = [
        TALK[1],
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "f", "content": "1"},
    ]
    trace = parse({"messages": messages})
    assert trace.threads["main"][1].tool_calls == (ToolCall("", "f", "{}"),)
    assert trace.threads["main"][2] == Message("tool", "1", name="f")


def test_lone_surrogates_become_replacement_characters() -> None:
    message = r'{"role": "user", "content": "a\ud800b \ud83d\ude00"}'
    tool = r'{"function": {"name": "\udfff"}}'
    turn = json.dumps(TALK[-1])
    data = f'{{"messages": [{message}, {turn}], "tools": [{tool}]}}'
    trace = parse_trace(data.encode())
    assert contents(trace)[0] == "a\ufffdb \U0001f600"
    assert trace.tools == ({"function": {"name": "\ufffd"}},)
