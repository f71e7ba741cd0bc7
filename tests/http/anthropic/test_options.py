"""Everything of a Messages API request that is no message."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvws.chat.call import ModelCall, Sampling, ToolChoice
from kvws.http.anthropic import ANTHROPIC

READ_TOOL = {"name": "Read", "description": "Reads.", "input_schema": {"type": "object"}}
WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
TITLE_FORMAT = {"type": "json_schema", "schema": {"type": "object", "required": ["title"]}}
CLAUDE_CODE = {"user_id": json.dumps({"device_id": "d", "session_id": "s"})}
SUMMARY = "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools. Write a summary."


def read(**more: Any) -> ModelCall:
    return ANTHROPIC.read({"messages": [{"role": "user", "content": "hi"}], **more})


def test_a_call_needs_no_more_than_messages() -> None:
    call = read()
    assert (call.model, call.max_tokens, call.stream) == ("", None, False)
    assert call.sampling == Sampling()
    assert (call.tools, call.tool_choice, call.parallel_tool_calls) == ((), ToolChoice(), True)
    assert (call.thinking, call.effort, call.json_schema) == (None, None, None)
    assert (call.side_call, call.dropped) == (False, ())


def test_null_is_the_same_as_absent() -> None:
    names = (
        "model system max_tokens temperature top_p top_k stop_sequences stream tools tool_choice "
        "thinking output_config metadata context_management"
    )
    assert read(**dict.fromkeys(names.split())) == read()


def test_what_decides_the_answer_is_read() -> None:
    call = read(
        model="kvws[1m]",
        max_tokens=32000,
        temperature=1,
        top_p=0.5,
        top_k=40,
        stop_sequences=["END", ""],
        stream=True,
    )
    assert (call.model, call.max_tokens, call.stream) == ("kvws[1m]", 32000, True)
    assert call.sampling == Sampling(temperature=1.0, top_p=0.5, top_k=40, stop=("END",))


def test_top_k_of_zero_leaves_it_to_the_model() -> None:
    assert read(top_k=0).sampling.top_k is None


# Tools ------------------------------------------------------------------------------------------


def test_tools_are_spelled_as_in_chat_completions_with_schemas_as_sent() -> None:
    schema = {"type": "object", "properties": {"z": {"type": "string"}, "a": {}}, "$schema": "x"}
    mark = {"cache_control": {"type": "ephemeral"}}
    tool = {"name": "Bash", "input_schema": schema, "description": "Runs.", **mark}
    (function,) = read(tools=[tool]).tools
    expected = {
        "type": "function",
        "function": {"name": "Bash", "description": "Runs.", "parameters": schema},
    }
    assert json.dumps(function) == json.dumps(expected)


def test_a_tool_without_a_schema_or_a_description_takes_nothing() -> None:
    (function,) = read(tools=[{"type": "custom", "name": "Go"}]).tools
    parameters = {"type": "object", "properties": {}}
    assert function["function"] == {"name": "Go", "parameters": parameters}


def test_tools_of_other_servers_are_dropped_but_a_typed_tool_with_a_schema_is_kept() -> None:
    newer = {"type": "custom_20990101", "name": "New", "input_schema": {"type": "object"}}
    call = read(tools=[WEB_SEARCH, READ_TOOL, newer])
    assert [tool["function"]["name"] for tool in call.tools] == ["Read", "New"]
    assert call.dropped == ("tool of type 'web_search_20250305'",)


@pytest.mark.parametrize(
    ("sent", "choice"),
    [
        ({"type": "auto"}, ToolChoice("auto")),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "none"}, ToolChoice("none")),
        ({"type": "tool", "name": "Read"}, ToolChoice("required", "Read")),
    ],
)
def test_the_choice_of_tools_is_read(sent: dict[str, str], choice: ToolChoice) -> None:
    assert read(tools=[READ_TOOL], tool_choice=sent).tool_choice == choice


def test_one_call_at_a_time_may_be_asked_for() -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert not read(tools=[READ_TOOL], tool_choice=choice).parallel_tool_calls


@pytest.mark.parametrize("sent", [{"type": "tool", "name": "web_search"}, {"type": "any"}])
def test_a_choice_that_only_a_dropped_tool_meets_is_open(sent: dict[str, str]) -> None:
    call = read(tools=[WEB_SEARCH], tool_choice=sent)
    assert call.tool_choice == ToolChoice("auto")
    assert "choice of a tool that cannot be called" in call.dropped


# Thinking and format ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        ({"type": "adaptive"}, None),
        ({"type": "enabled", "budget_tokens": 1024}, True),
        ({"type": "disabled"}, False),
        ({"type": "deeper"}, None),
    ],
)
def test_thinking_is_wanted_forbidden_or_left_to_the_model(
    thinking: dict[str, object], expected: bool | None
) -> None:
    assert read(thinking=thinking).thinking is expected


def test_effort_is_kept_as_spelled_and_none_means_not_to_think() -> None:
    call = read(output_config={"effort": "xhigh"}, thinking={"type": "adaptive"})
    assert (call.thinking, call.effort) == (None, "xhigh")
    call = read(output_config={"effort": "none"}, thinking={"type": "adaptive"})
    assert (call.thinking, call.effort) == (False, None)


def test_a_json_schema_is_read_and_another_format_is_dropped() -> None:
    assert read(output_config={"format": TITLE_FORMAT}).json_schema == TITLE_FORMAT["schema"]
    assert read(output_config={"format": {"type": "json_schema"}}).json_schema == {}
    call = read(output_config={"format": {"type": "poem"}})
    assert (call.json_schema, call.dropped) == (None, ("output format of an unknown type",))


# Asides -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        {"output_config": {"format": TITLE_FORMAT}, "tools": []},
        {"tools": [WEB_SEARCH], "tool_choice": {"type": "auto"}},
        {"tools": [], "metadata": CLAUDE_CODE},
        {"metadata": CLAUDE_CODE},
    ],
)
def test_titles_searches_and_calls_without_tools_of_an_agent_are_asides(
    body: dict[str, Any],
) -> None:
    assert read(**body).side_call


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [READ_TOOL], "metadata": CLAUDE_CODE},
        {"tools": [READ_TOOL, WEB_SEARCH], "metadata": CLAUDE_CODE},
        {"tools": [READ_TOOL], "output_config": {"format": TITLE_FORMAT}},
        {},
        {"tools": [], "metadata": {"user_id": "somebody"}},
        {"metadata": {"user_id": "[" * 100_000}},
        {"metadata": {"user_id": "7"}},
        {"metadata": "odd"},
    ],
)
def test_turns_with_tools_and_plain_chats_are_no_asides(body: dict[str, Any]) -> None:
    assert not read(**body).side_call


@pytest.mark.parametrize(
    "content",
    [
        SUMMARY,
        [{"type": "text", "text": SUMMARY}],
        [
            {"type": "tool_result", "tool_use_id": "t1", "content": "x"},
            {"type": "text", "text": SUMMARY},
        ],
    ],
)
def test_the_request_for_a_summary_is_an_aside_though_it_has_tools(content: object) -> None:
    messages = [{"role": "user", "content": content}]
    assert read(messages=messages, tools=[READ_TOOL]).side_call


def test_a_summary_that_was_asked_for_earlier_makes_no_aside() -> None:
    messages = [
        {"role": "user", "content": SUMMARY},
        {"role": "assistant", "content": "Summary."},
        {"role": "user", "content": "go on"},
    ]
    assert not read(messages=messages, tools=[READ_TOOL]).side_call
