"""What bodies look like, as JSON schemas: loose, because the readers are, but typed.

A body that follows its schema is read; many that do not are read as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_TOKENS: Schema = {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_TEMPERATURE: Schema = {"type": "number", "minimum": 0, "maximum": 2}
_TOP_P: Schema = {"type": "number", "minimum": 0.01, "maximum": 1}


def _object(required: tuple[str, ...], **properties: Schema) -> Schema:
    return {"type": "object", "required": list(required), "properties": properties}


def _list_of(items: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": items, **limits}


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _enum(*values: str) -> Schema:
    return {"enum": list(values)}


_NAME: Schema = {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"}
_FUNCTION = _object(("name",), name=_NAME, description=_TEXT, parameters={"type": "object"})

_BLOCK: Schema = {
    "oneOf": [
        _object(("type", "text"), type=_enum("text"), text=_TEXT),
        _object(
            ("type", "tool_use_id"),
            type=_enum("tool_result"),
            tool_use_id=_TEXT,
            content=_TEXT,
            is_error=_FLAG,
        ),
        _object(
            ("type", "id", "name", "input"),
            type=_enum("tool_use"),
            id=_TEXT,
            name=_NAME,
            input={"type": "object"},
        ),
        _object(("type", "thinking"), type=_enum("thinking"), thinking=_TEXT, signature=_TEXT),
    ]
}
_PART: Schema = {
    "oneOf": [
        _object(("type", "text"), type=_enum("text", "input_text", "output_text"), text=_TEXT),
        _object(("type",), type=_enum("image_url", "input_image", "input_file")),
    ]
}

_COUNTED_ANTHROPIC = _object(
    ("messages",),
    model=_TEXT,
    system={"anyOf": [_TEXT, _list_of(_object(("type", "text"), type=_enum("text"), text=_TEXT))]},
    messages=_list_of(
        _object(
            ("role", "content"),
            role=_enum("user", "assistant", "system"),
            content={"anyOf": [_TEXT, _list_of(_BLOCK)]},
        ),
        minItems=1,
    ),
    tools=_list_of(
        _object(("name",), name=_NAME, description=_TEXT, input_schema={"type": "object"})
    ),
    tool_choice=_object(
        ("type",), type=_enum("auto", "any", "none"), disable_parallel_tool_use=_FLAG
    ),
    thinking=_object(("type",), type=_enum("enabled", "adaptive", "disabled")),
)
_ANTHROPIC: Schema = {
    **_COUNTED_ANTHROPIC,
    "properties": {
        **_COUNTED_ANTHROPIC["properties"],
        "max_tokens": _TOKENS,
        "stream": _FLAG,
        "temperature": _TEMPERATURE,
        "top_p": _TOP_P,
        "top_k": _COUNT,
        "stop_sequences": _list_of(_TEXT),
    },
}
_CHAT_COMPLETIONS = _object(
    ("messages",),
    model=_TEXT,
    messages=_list_of(
        _object(
            ("role",),
            role=_enum("system", "developer", "user", "assistant", "tool"),
            content=_nullable({"anyOf": [_TEXT, _list_of(_PART)]}),
            tool_call_id=_TEXT,
            tool_calls=_list_of(
                _object(
                    ("id", "function"),
                    id=_TEXT,
                    type=_enum("function"),
                    function=_object(("name", "arguments"), name=_NAME, arguments=_TEXT),
                )
            ),
        ),
        minItems=1,
    ),
    tools=_list_of(_object(("type", "function"), type=_enum("function"), function=_FUNCTION)),
    tool_choice=_enum("auto", "none", "required"),
    parallel_tool_calls=_FLAG,
    max_tokens=_TOKENS,
    max_completion_tokens=_TOKENS,
    temperature=_TEMPERATURE,
    top_p=_TOP_P,
    stop={"anyOf": [_TEXT, _list_of(_TEXT, maxItems=16)]},
    stream=_FLAG,
    stream_options=_object((), include_usage=_FLAG),
)
_RESPONSES = _object(
    ("model", "input"),
    model={"type": "string", "minLength": 1},
    instructions=_TEXT,
    input={
        "anyOf": [
            {"type": "string", "minLength": 1},
            _list_of(
                _object(
                    ("type", "role", "content"),
                    type=_enum("message"),
                    role=_enum("system", "developer", "user", "assistant"),
                    content={"anyOf": [_TEXT, _list_of(_PART)]},
                ),
                minItems=1,
            ),
        ]
    },
    tools=_list_of(
        {**_FUNCTION, "properties": {**_FUNCTION["properties"], "type": _enum("function")}}
    ),
    tool_choice=_enum("auto", "none", "required"),
    parallel_tool_calls=_FLAG,
    max_output_tokens=_TOKENS,
    temperature=_TEMPERATURE,
    top_p=_TOP_P,
    stream=_FLAG,
)

REQUESTS: Mapping[str, Schema] = {
    "/v1/messages": _ANTHROPIC,
    "/v1/messages/count_tokens": _COUNTED_ANTHROPIC,
    "/v1/chat/completions": _CHAT_COMPLETIONS,
    "/v1/responses": _RESPONSES,
}
"""Body of a POST, by path."""

ANSWERS: Mapping[str, Schema] = {
    "/v1/messages": _object(
        ("id", "type", "role", "model", "content", "stop_reason", "usage"),
        id=_TEXT,
        type=_enum("message"),
        role=_enum("assistant"),
        content=_list_of(_object(("type",), type=_enum("text", "thinking", "tool_use"))),
        stop_reason=_enum("end_turn", "max_tokens", "tool_use", "stop_sequence"),
        usage=_object(
            ("input_tokens", "output_tokens"), input_tokens=_COUNT, output_tokens=_COUNT
        ),
    ),
    "/v1/messages/count_tokens": _object(("input_tokens",), input_tokens=_COUNT),
    "/v1/chat/completions": _object(
        ("id", "object", "created", "model", "choices", "usage"),
        object=_enum("chat.completion"),
        created=_COUNT,
        choices=_list_of(
            _object(
                ("index", "message", "finish_reason"),
                message=_object(("role", "content"), role=_enum("assistant")),
                finish_reason=_enum("stop", "length", "tool_calls"),
            ),
            minItems=1,
        ),
        usage=_object(("prompt_tokens", "completion_tokens", "total_tokens"), total_tokens=_COUNT),
    ),
    "/v1/responses": _object(
        ("id", "object", "status", "output", "usage"),
        object=_enum("response"),
        status=_enum("completed", "incomplete"),
        output=_list_of(_object(("type",), type=_TEXT)),
    ),
}
"""Body of an answer in one piece, by path."""

EVENT = _object(("data",), event=_TEXT, data=_TEXT)
"""One server-sent event of a streamed answer; its data is JSON text, or [DONE]."""

MODEL: Schema = {"anyOf": [_object(("id", "type")), _object(("id", "object", "created"))]}
MODELS: Schema = _object(("data",), data=_list_of(MODEL))
ANYTHING: Schema = {"type": "object"}

ANTHROPIC_ERROR = _object(
    ("type", "error"),
    type=_enum("error"),
    error=_object(("type", "message"), type=_TEXT, message=_TEXT),
)
OPENAI_ERROR = _object(
    ("error",),
    error=_object(
        ("message", "type", "code"),
        message=_TEXT,
        type=_TEXT,
        code=_nullable(_TEXT),
    ),
)
