"""Whatever JSON comes, it is a call or a bad request."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from kvws.chat.call import ModelCall
from kvws.errors import BadRequest
from kvws.http.responses import RESPONSES

json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=10,
)
item_types = st.sampled_from(
    [
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "local_shell_call",
        "local_shell_call_output",
        "web_search_call",
        "item_reference",
        "namespace",
        "function",
        "custom",
        "input_text",
        "output_text",
        "refusal",
        "input_image",
        "allowed_tools",
    ]
)
field_names = st.sampled_from(
    ["role", "content", "name", "arguments", "call_id", "output", "summary", "input", "tools"]
)
values = st.recursive(
    st.one_of(json_values, st.sampled_from(["user", "assistant", "developer", "auto", "a\ud800"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.builds(
            lambda kind, fields: {"type": kind, **fields},
            item_types,
            st.dictionaries(field_names, inner, max_size=4),
        ),
    ),
    max_leaves=12,
)
body_names = st.sampled_from(
    ["model", "input", "instructions", "tools", "tool_choice", "reasoning", "text", "stream"]
)
bodies = st.one_of(
    json_values,
    st.dictionaries(body_names, values),
    st.builds(
        lambda fields, items: {**fields, "model": "kvws", "input": items},
        st.fixed_dictionaries({}, optional={"tools": values, "tool_choice": values}),
        st.lists(values, max_size=4),
    ),
)


@settings(max_examples=500, deadline=None)
@given(bodies)
def test_any_json_is_a_call_or_a_bad_request(body: object) -> None:
    try:
        call = RESPONSES.read(body)
    except BadRequest as refused:
        assert str(refused)
        return
    assert isinstance(call, ModelCall) and call.messages
    prompt = [[m.content, m.reasoning, [c.arguments for c in m.tool_calls]] for m in call.messages]
    json.dumps([prompt, call.tools], ensure_ascii=False).encode()
