"""What a chat-completions body means."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from kvws.chat.call import ModelCall, Sampling, ToolChoice
from kvws.chat.message import Message, ToolCall
from kvws.errors import BadRequest
from kvws.http.chat_completions import CHAT_COMPLETIONS, is_aside

USER = {"role": "user", "content": "List."}
LS = {"name": "ls", "description": "Lists.", "parameters": {"type": "object", "b": 1, "a": 2}}
TOOL = {"type": "function", "function": LS}


def read(**fields: Any) -> ModelCall:
    return CHAT_COMPLETIONS.read({"model": "m", "messages": [USER], **fields})


def read_message(**fields: Any) -> Message:
    (message,) = read(messages=[fields]).messages
    return message


def test_a_call_that_says_little_leaves_the_rest_open() -> None:
    assert read() == ModelCall(model="m", messages=(Message("user", "List."),))
    assert CHAT_COMPLETIONS.read({"messages": [USER]}).model == ""


@pytest.mark.parametrize(
    ("said", "read_as"),
    [
        ("system", "system"),
        ("developer", "system"),
        ("user", "user"),
        ("assistant", "assistant"),
        ("tool", "tool"),
        ("function", "tool"),
    ],
)
def test_roles(said: str, read_as: str) -> None:
    assert read_message(role=said, content="x").role == read_as


def test_a_system_message_stays_where_it_was_sent() -> None:
    call = read(messages=[USER, {"role": "developer", "content": "Be brief."}, USER])
    assert [message.role for message in call.messages] == ["user", "system", "user"]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a\n b ", "a\n b "),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "a"}], "a"),
        ([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}], "a"),
        ([{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"], "a\nb\nc"),
        ([{"type": "text", "text": None}, {"text": "b"}], "\nb"),
        ("half \ud83d of a pair", "half \ufffd of a pair"),
    ],
)
def test_content_is_text_however_it_is_wrapped(content: Any, text: str) -> None:
    assert read_message(role="user", content=content).content == text


def test_missing_content_is_empty() -> None:
    assert read_message(role="assistant") == Message("assistant", "")


def test_the_pieces_of_an_answer_are_one_text() -> None:
    parts = [{"type": "text", "text": "ab"}, {"type": "refusal", "refusal": "cd"}]
    assert read_message(role="assistant", content=parts).content == "abcd"
    assert read_message(role="assistant", content=None, refusal="No.").content == "No."


@pytest.mark.parametrize(
    ("part", "placeholder", "noted"),
    [
        (
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
            "[image/png image: this model reads text only]",
            "image parts shown as placeholders: 1",
        ),
        (
            {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
            "[image: this model reads text only]",
            "image parts shown as placeholders: 1",
        ),
        (
            {"type": "input_image", "image_url": "data:image/jpeg;base64,AAAA"},
            "[image/jpeg image: this model reads text only]",
            "image parts shown as placeholders: 1",
        ),
        (
            {"type": "file", "file": {"filename": "a.pdf", "file_data": "AAAA"}},
            "[file a.pdf: this model reads text only]",
            "file parts shown as placeholders: 1",
        ),
        (
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
            "[audio: this model reads text only]",
            "audio parts shown as placeholders: 1",
        ),
    ],
)
def test_what_is_no_text_leaves_a_placeholder(part: Any, placeholder: str, noted: str) -> None:
    call = read(messages=[{"role": "user", "content": [{"type": "text", "text": "See"}, part]}])
    assert call.messages[0].content == f"See\n{placeholder}"
    assert call.dropped == (noted,)


def test_unknown_parts_are_skipped_and_noted() -> None:
    content = [{"type": "hologram"}, {"type": "text", "text": "a"}, {"type": "hologram"}]
    call = read(messages=[{"role": "user", "content": content}])
    assert call.messages[0].content == "a"
    assert call.dropped == ("content parts of type 'hologram' skipped: 2",)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_reasoning_that_a_client_sends_back_is_kept(key: str) -> None:
    message = read_message(role="assistant", content="a", **{key: "Hm."})
    assert message == Message("assistant", "a", reasoning="Hm.")


def test_arguments_are_kept_letter_by_letter() -> None:
    arguments = '{ "b":1,\n"a": "\\u00e4" }'
    function = {"name": "ls", "arguments": arguments}
    message = read_message(
        role="assistant", tool_calls=[{"id": "c1", "type": "function", "function": function}]
    )
    assert message.tool_calls == (ToolCall("c1", "ls", arguments),)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({"b": 1, "a": "ä"}, '{"b":1,"a":"ä"}'), (None, "{}"), ("", "{}"), ({}, "{}")],
)
def test_arguments_that_are_no_text_become_compact_text(arguments: Any, text: str) -> None:
    function = {"name": "ls", "arguments": arguments}
    message = read_message(role="assistant", tool_calls=[{"id": "c", "function": function}])
    assert message.tool_calls == (ToolCall("c", "ls", text),)


def test_a_legacy_function_call_is_a_tool_call_without_an_id() -> None:
    message = read_message(role="assistant", function_call={"name": "ls", "arguments": "{}"})
    assert message.tool_calls == (ToolCall("", "ls", "{}"),)


def test_a_tools_answer_is_named_after_its_call_where_it_does_not_say() -> None:
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": "{}"}},
        {"id": "c2", "type": "function", "function": {"name": "cat", "arguments": "{}"}},
    ]
    call = read(
        messages=[
            {"role": "assistant", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c2", "content": "two"},
            {"role": "tool", "tool_call_id": "c1", "content": "one", "name": "own"},
            {"role": "tool", "tool_call_id": "c9", "content": "nine"},
            {"role": "function", "name": "old", "content": "zero"},
        ]
    )
    assert call.messages[1:] == (
        Message("tool", "two", name="cat", tool_call_id="c2"),
        Message("tool", "one", name="own", tool_call_id="c1"),
        Message("tool", "nine", tool_call_id="c9"),
        Message("tool", "zero", name="old"),
    )


def test_tools_keep_the_key_order_of_their_schemas() -> None:
    tool = {**TOOL, "cache_control": {}, "function": {**LS, "cache_control": {}}}
    (read_tool,) = read(tools=[tool]).tools
    assert json.dumps(read_tool) == json.dumps(TOOL)


def test_legacy_functions_are_tools() -> None:
    call = read(functions=[LS], function_call={"name": "ls"})
    assert call.tools == (TOOL,)
    assert call.tool_choice == ToolChoice("required", "ls")


def test_tools_of_other_types_are_dropped_and_noted() -> None:
    call = read(tools=[{"type": "web_search"}, TOOL])
    assert call.tools == (TOOL,)
    assert call.dropped == ("tools of type 'web_search' dropped: 1",)


@pytest.mark.parametrize(
    ("value", "choice"),
    [
        (None, ToolChoice("auto")),
        ("auto", ToolChoice("auto")),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "function": {"name": "ls"}}, ToolChoice("required", "ls")),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}},
            ToolChoice("required"),
        ),
    ],
)
def test_tool_choices(value: Any, choice: ToolChoice) -> None:
    assert read(tools=[TOOL], tool_choice=value).tool_choice == choice


def test_no_tool_can_be_required_where_there_is_none() -> None:
    call = read(tool_choice="required")
    assert call.tool_choice == ToolChoice("auto")
    assert call.dropped


def test_one_call_at_a_time_can_be_asked_for() -> None:
    assert read().parallel_tool_calls
    assert not read(parallel_tool_calls=False).parallel_tool_calls


def test_the_newer_name_of_the_answers_length_counts() -> None:
    assert read(max_tokens=5).max_tokens == 5
    assert read(max_tokens=5, max_completion_tokens=6).max_tokens == 6


def test_sampling() -> None:
    call = read(
        temperature=0,
        top_p=0.5,
        top_k=20,
        min_p=0.05,
        frequency_penalty=-1,
        presence_penalty=1.5,
        repetition_penalty=1.1,
        seed=-3,
        stop=["a", "", "b"],
    )
    assert call.sampling == Sampling(0.0, 0.5, 20, 0.05, -1.0, 1.5, 1.1, -3, ("a", "b"))
    assert call.dropped == ("empty stop texts ignored: 1",)
    assert read(stop="a").sampling.stop == ("a",)


def test_limits_that_engines_spell_otherwise() -> None:
    assert read(top_k=0).sampling == read(top_k=-1).sampling == Sampling(top_k=-1)


@pytest.mark.parametrize(
    ("fields", "thinking", "effort"),
    [
        ({}, None, None),
        ({"reasoning_effort": "high"}, None, "high"),
        ({"reasoning_effort": "none"}, False, None),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False, None),
        ({"chat_template_kwargs": {"thinking": True}, "reasoning_effort": "low"}, True, "low"),
    ],
)
def test_thinking(fields: dict[str, Any], thinking: bool | None, effort: str | None) -> None:
    call = read(**fields)
    assert (call.thinking, call.effort) == (thinking, effort)


SCHEMA = {"type": "object", "properties": {"title": {"type": "string"}}}
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "t", "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("wanted", "schema"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, {}),
        (SCHEMA_FORMAT, SCHEMA),
    ],
)
def test_answers_that_must_be_json(wanted: Any, schema: Any) -> None:
    assert read(response_format=wanted).json_schema == schema


def test_a_stream_ends_with_usage_only_if_asked() -> None:
    assert read().include_usage and not read().stream
    assert read(stream=True).stream and not read(stream=True).include_usage
    assert read(stream=True, stream_options={"include_usage": True}).include_usage


@pytest.mark.parametrize(
    ("fields", "side_call"),
    [
        ({}, False),
        ({"response_format": {"type": "json_object"}}, False),
        ({"response_format": SCHEMA_FORMAT}, True),
        ({"prompt_cache_key": "s"}, True),
        ({"prompt_cache_key": "s", "tools": [TOOL]}, False),
        ({"prompt_cache_key": "s", "tools": [{"type": "web_search"}]}, False),
        ({"response_format": SCHEMA_FORMAT, "tools": [TOOL]}, False),
    ],
)
def test_asides_offer_no_tools(fields: dict[str, Any], side_call: bool) -> None:
    assert read(**fields).side_call is side_call


def test_opencodes_asides_show_in_a_header() -> None:
    opencode = {"x-session-affinity": "ses_1", "x-session-id": "ses_1"}
    assert is_aside(read(), opencode)
    assert not is_aside(read(tools=[TOOL]), opencode)
    assert not is_aside(read(), {"x-session-id": "ses_1"})
    assert is_aside(read(prompt_cache_key="s"), {})


def test_what_has_no_effect_is_noted_and_never_refused() -> None:
    call = read(logprobs=True, top_logprobs=5, user="u", store=True, logit_bias={})
    assert call.dropped == ("logprobs ignored: 1", "top_logprobs ignored: 1")


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages.0"),
        ({"messages": [USER, {"content": "x"}]}, "messages.1.role"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages.0.content.0"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "messages.0.content.0.text",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": []}]}]},
            "messages.0.tool_calls.0.function",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": 5}}]}]},
            "messages.0.tool_calls.0.function.arguments",
        ),
        ({"model": 5}, "model"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "rm"}}},
            "tool_choice.function.name",
        ),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": "many"}, "max_completion_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": "most"}, "top_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 10**400}, "seed"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": [5]}, "stop.0"),
        ({"n": 2}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
    ],
)
def test_what_is_no_call_is_refused_by_its_path(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(BadRequest, match=rf"^{re.escape(path)}: ") as refusal:
        read(**fields)
    assert refusal.value.hint.startswith("send ")


def test_a_body_must_be_an_object() -> None:
    with pytest.raises(BadRequest, match=r"^body: "):
        CHAT_COMPLETIONS.read([USER])


def test_a_schema_nested_without_end_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(BadRequest, match="nested too deeply"):
        read(tools=[{"type": "function", "function": {"name": "f", "parameters": deep}}])


WORDS = st.sampled_from(
    [
        *("user", "assistant", "system", "tool", "function", "text", "image_url", "file"),
        *("json_schema", "json_object", "auto", "required", "none", "ls", "refusal"),
    ]
)
SCALARS = st.one_of(WORDS, st.none(), st.booleans(), st.integers(), st.floats(), st.text())
KEYS = st.one_of(
    WORDS,
    st.sampled_from(
        [
            *("role", "content", "type", "text", "name", "arguments", "id", "tool_calls"),
            *("function_call", "url", "filename", "schema", "mode", "enable_thinking"),
            *("allowed_tools", "reasoning", "tool_call_id"),
        ]
    ),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=5)),
    max_leaves=12,
)
CALLS = st.lists(
    st.fixed_dictionaries(
        {"function": st.one_of(VALUES, st.fixed_dictionaries({"name": WORDS}))},
        optional={"id": WORDS, "type": WORDS},
    ),
    max_size=3,
)
PARTS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "image_url", "file", "refusal", "unknown"])},
        optional={"text": st.text(), "image_url": VALUES, "file": VALUES, "refusal": SCALARS},
    ),
    max_size=3,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "function"])},
        optional={
            "content": st.one_of(st.text(), PARTS, PARTS, VALUES),
            "tool_calls": st.one_of(CALLS, CALLS, VALUES),
            "reasoning": SCALARS,
            "tool_call_id": SCALARS,
            "name": SCALARS,
        },
    ),
    min_size=1,
    max_size=4,
)
TOP = st.sampled_from(
    [
        *("model", "tools", "functions", "tool_choice", "function_call", "max_tokens", "n"),
        *("temperature", "top_p", "top_k", "seed", "stop", "reasoning_effort", "stream"),
        *("stream_options", "response_format", "chat_template_kwargs", "prompt_cache_key"),
        *("parallel_tool_calls", "logprobs", "min_p", "repetition_penalty"),
    ]
)
TOOLS = st.lists(st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": WORDS})}))
OBJECTS = st.builds(
    lambda messages, tools, rest: {"messages": messages, "tools": tools, **rest},
    st.one_of(MESSAGES, MESSAGES, MESSAGES, VALUES),
    st.one_of(TOOLS, TOOLS, VALUES),
    st.dictionaries(TOP, st.one_of(st.none(), VALUES), max_size=2),
)
BODIES = st.one_of(OBJECTS, OBJECTS, OBJECTS, VALUES)


@settings(max_examples=1500, deadline=None)
@given(BODIES)
def test_any_body_is_a_call_or_a_bad_request(body: Any) -> None:
    try:
        call = CHAT_COMPLETIONS.read(body)
    except BadRequest as error:
        assert error.hint
        event("refused")
        return
    event("read")
    assert call.messages
    for message in call.messages:
        (message.content + message.reasoning + (message.name or "")).encode()
        for tool_call in message.tool_calls:
            (tool_call.id + tool_call.name + tool_call.arguments).encode()
    json.dumps(call.tools, ensure_ascii=False).encode()
    "".join((*call.dropped, *call.sampling.stop, call.model, call.effort or "")).encode()
