"""A request body of the Responses API as a call."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvws.chat.call import Sampling
from kvws.errors import BadRequest
from kvws.http.recollection import Recollection
from kvws.http.responses.fields import (
    Dropped,
    clean,
    cleaned,
    flag,
    is_mapping,
    kind_of,
    mapping,
    number,
    string,
    whole_number,
    wrong,
)
from kvws.http.responses.items import read_messages
from kvws.http.responses.tools import ResponsesCall, read_tool_choice, read_tools

_KEPT_BY_A_SERVER = ("previous_response_id", "conversation", "prompt")


def read_call(body: object, recollection: Recollection) -> ResponsesCall:
    """The call in a decoded body. Mutates `recollection`.

    Raises:
        BadRequest: as Dialect.read.
    """
    if not is_mapping(body):
        raise wrong("the body", "a JSON object", body)
    _refuse_what_needs_memory(body)
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise BadRequest("model must be a string", hint="any name will do")
    dropped = Dropped()
    messages = read_messages(body.get("instructions"), body.get("input"), dropped, recollection)
    if not messages:
        raise BadRequest("input holds no message", hint="send at least one message item")
    tools = read_tools(body.get("tools"), dropped)
    effort = string(mapping(body.get("reasoning")).get("effort"))
    return ResponsesCall(
        model=clean(model),
        messages=messages,
        tools=tools.functions,
        tool_choice=read_tool_choice(body.get("tool_choice"), tools, dropped),
        parallel_tool_calls=flag(body, "parallel_tool_calls", default=True),
        max_tokens=whole_number(body, "max_output_tokens", least=1),
        sampling=Sampling(
            temperature=number(body, "temperature", least=0),
            top_p=number(body, "top_p", least=0, most=1),
        ),
        thinking=False if effort == "none" else None,
        effort=None if effort == "none" else effort or None,
        json_schema=_json_schema(mapping(body.get("text")).get("format"), dropped),
        stream=flag(body, "stream", default=False),
        side_call=_is_side_call(body),
        dropped=dropped.phrases(),
        origins=tools.origins,
    )


def _refuse_what_needs_memory(body: Mapping[str, Any]) -> None:
    for name in _KEPT_BY_A_SERVER:
        if body.get(name) is not None:
            raise BadRequest(
                f"{name} refers to something that this server does not keep",
                hint="send the whole input with every request",
            )
    if body.get("background") not in (None, False):
        raise BadRequest(
            "background responses are not kept for later",
            hint="leave background out, and stream the answer",
        )


def _json_schema(text_format: object, dropped: Dropped) -> Mapping[str, Any] | None:
    """What the answer must follow; as in ModelCall. Mutates `dropped`.

    Raises:
        BadRequest: a json_schema format without a schema.
    """
    wanted = mapping(text_format)
    kind = kind_of(wanted)
    if kind == "json_schema":
        schema = wanted.get("schema")
        if not is_mapping(schema):
            raise wrong("text.format.schema", "an object", schema)
        return cleaned(schema)
    if kind == "json_object":
        return {}
    if kind not in ("", "text"):
        dropped.note(f"text.format {kind}")
    return None


def _is_side_call(body: Mapping[str, Any]) -> bool:
    """Whether Codex says that it does not ask for a turn, but for a summary or a memory."""
    metadata = mapping(body.get("client_metadata")).get("x-codex-turn-metadata")
    try:
        turn = mapping(json.loads(string(metadata) or "null"))
    except (ValueError, RecursionError):
        return False
    return string(turn.get("request_kind")) not in ("", "turn")
