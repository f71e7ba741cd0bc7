"""What is no call at all is refused, and the refusal says where and why."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvws.chat.call import ModelCall
from kvws.errors import BadRequest
from kvws.http.anthropic import ANTHROPIC

HI = [{"role": "user", "content": "hi"}]
TOOL = {"name": "Read", "input_schema": {"type": "object"}}


@pytest.mark.parametrize("body", [None, [], "text", 7, True])
def test_a_body_that_is_no_object_is_refused(body: object) -> None:
    with pytest.raises(BadRequest, match=r"^body: .*expected a JSON object"):
        ANTHROPIC.read(body)


@pytest.mark.parametrize(
    ("changes", "where", "expected"),
    [
        ({"messages": None}, "messages", "at least one message"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": "hi"}, "messages", "a list of messages"),
        ({"messages": [7]}, "messages.0", "an object"),
        ({"messages": [{"content": "hi"}]}, "messages.0.role", "user"),
        ({"messages": [*HI, {"role": "tool", "content": "x"}]}, "messages.1.role", "user"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages.0.role", "user"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages.0.content", "list of content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content.0", "block"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]},
            "messages.0.content.0.text",
            "a text",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t"}]}]},
            "messages.0.content.0.name",
            "the name of a tool",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": 7}]}]},
            "messages.0.content.0.content",
            "list of content",
        ),
        ({"system": 7}, "system", "list of content"),
        ({"tools": {}}, "tools", "a list of tools"),
        ({"tools": [TOOL, {"description": "x"}]}, "tools.1.name", "the name of a tool"),
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools.0.name", "the name of a tool"),
        ({"tools": [{"name": "x", "input_schema": []}]}, "tools.0.input_schema", "a JSON schema"),
        ({"tool_choice": "auto"}, "tool_choice", "an object"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type", "auto"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "the name of a tool"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": True}, "max_tokens", "at least 1"),
        ({"max_tokens": 1.5}, "max_tokens", "at least 1"),
        ({"max_tokens": "9"}, "max_tokens", "at least 1"),
        ({"temperature": -0.1}, "temperature", "from 0 to 2"),
        ({"temperature": "hot"}, "temperature", "from 0 to 2"),
        ({"temperature": float("nan")}, "temperature", "from 0 to 2"),
        ({"top_p": -0.1}, "top_p", "to 1"),
        ({"top_k": -1}, "top_k", "at least 0"),
        ({"stop_sequences": "END"}, "stop_sequences", "a list of texts"),
        ({"stop_sequences": ["END", 7]}, "stop_sequences.1", "a text"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"thinking": "on"}, "thinking", "an object"),
        ({"output_config": {"effort": 3}}, "output_config.effort", "a text"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": "x"}}},
            "output_config.format.schema",
            "a JSON schema",
        ),
    ],
)
def test_what_is_wrong_is_named_with_what_is_expected(
    changes: dict[str, Any], where: str, expected: str
) -> None:
    with pytest.raises(BadRequest) as refusal:
        ANTHROPIC.read({"messages": HI, **changes})
    message, hint = str(refusal.value).split(" (", 1)
    assert message.startswith(f"{where}: cannot use ")
    assert expected in hint


def test_a_refusal_quotes_no_more_than_the_beginning_of_a_value() -> None:
    with pytest.raises(BadRequest) as refusal:
        ANTHROPIC.read({"messages": HI, "temperature": "secret\n" * 1000})
    assert len(str(refusal.value)) < 200
    assert "\n" not in str(refusal.value)


def test_a_body_nested_beyond_measure_is_refused() -> None:
    nested: Any = "x"
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(BadRequest, match="nested too deeply"):
        use = {"type": "tool_use", "id": "t1", "name": "Bash", "input": {"deep": nested}}
        ANTHROPIC.read({"messages": [*HI, {"role": "assistant", "content": [use]}]})


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.sampled_from(["user", "assistant", "system", "\ud83d", '{"a":1}', "none", "auto", "any"])
)
BLOCK_TYPES = (
    "text image document search_result tool_reference tool_use tool_result thinking "
    "redacted_thinking server_tool_use web_search_tool_result json_schema content tool base64"
)
KEYS = (
    "type role content text source data title input id name tool_use_id is_error thinking "
    "messages system tools tool_choice max_tokens temperature top_p top_k stop_sequences stream "
    "output_config effort format schema input_schema metadata user_id __unparsedToolInput raw len"
)


def objects_of(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    known = st.sampled_from(KEYS.split())
    return st.dictionaries(known | st.text(), values, max_size=6) | st.builds(
        lambda kind, members: {**members, "type": kind},
        st.sampled_from(BLOCK_TYPES.split()),
        st.dictionaries(known, values, max_size=4),
    )


JSON = st.recursive(
    LEAVES, lambda values: st.lists(values, max_size=4) | objects_of(values), max_leaves=24
)
TEXTS = st.none() | st.text(st.characters(), max_size=9) | st.sampled_from(["t1", '{"a":1}'])
TEXT_LISTS = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}), max_size=2)
BLOCKS = st.fixed_dictionaries(
    {"type": st.sampled_from(BLOCK_TYPES.split())},
    optional={
        **dict.fromkeys(("text", "thinking", "id", "tool_use_id", "title"), TEXTS),
        "name": st.text(st.characters(), min_size=1),
        "input": JSON,
        "content": TEXTS | TEXT_LISTS,
        "source": st.fixed_dictionaries({"type": TEXTS, "data": TEXTS, "content": TEXT_LISTS}),
        "is_error": st.booleans(),
    },
)
ROLES = st.sampled_from(["user", "assistant", "system"])
MESSAGES = st.fixed_dictionaries({"role": ROLES, "content": TEXTS | st.lists(BLOCKS, max_size=4)})
ODD_MESSAGES = st.fixed_dictionaries({"role": ROLES, "content": JSON})
BODIES = st.builds(
    lambda options, messages: {**options, "messages": messages},
    st.dictionaries(st.sampled_from(KEYS.split()), JSON, max_size=3),
    st.lists(MESSAGES, min_size=1, max_size=4) | st.lists(ODD_MESSAGES, max_size=2),
)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(JSON | BODIES)
def test_any_json_is_a_call_or_refused(body: object) -> None:
    try:
        call = ANTHROPIC.read(body)
    except BadRequest as refusal:
        assert refusal.hint
        return
    assert isinstance(call, ModelCall)
    assert call.messages
    texts = [
        (m.content, m.reasoning, [(c.id, c.name, c.arguments) for c in m.tool_calls])
        for m in call.messages
    ]
    json.dumps(texts, ensure_ascii=False).encode()
