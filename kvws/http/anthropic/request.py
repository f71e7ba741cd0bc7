"""The body of a Messages API request as a model call.

Lenient where a model can still answer: clients send far more than a text model can use, and a
refused request ends an agent's run. Only what is no call at all is refused.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

from kvws.chat.call import ModelCall, Sampling
from kvws.errors import BadRequest
from kvws.http.anthropic.markers import COMPACTION_PROMPT
from kvws.http.anthropic.messages import read_messages
from kvws.http.anthropic.part import Part
from kvws.http.anthropic.tools import read_tool_choice, read_tools
from kvws.http.recollection import Recollection

_TEMPERATURE_MAX = 2.0


def read_call(body: object, recollection: Recollection) -> ModelCall:
    """The call in a decoded JSON body. Mutates `recollection`.

    Raises:
        BadRequest: it is no call.
    """
    if not isinstance(body, dict):
        raise Part(body).refused("a JSON object")
    try:
        return _call(Part(body), recollection)
    except RecursionError as error:
        raise BadRequest("body: nested too deeply", hint="send flatter JSON") from error


def _call(body: Part, recollection: Recollection) -> ModelCall:
    dropped: Counter[str] = Counter()
    messages = read_messages(body, dropped, recollection)
    tools = read_tools(body.get("tools"), dropped)
    tool_choice, parallel = read_tool_choice(body.get("tool_choice"), tools, dropped)
    thinking, effort = _thinking(body, dropped)
    json_schema = _json_schema(body, dropped)
    return ModelCall(
        model=body.get("model").text(),
        messages=messages,
        tools=tools,
        tool_choice=tool_choice,
        parallel_tool_calls=parallel,
        max_tokens=body.get("max_tokens").integer(1),
        sampling=_sampling(body),
        thinking=thinking,
        effort=effort,
        json_schema=json_schema,
        stream=body.get("stream").flag(),
        side_call=_is_aside(body, has_tools=bool(tools)),
        dropped=tuple(what if n == 1 else f"{what} ({n} times)" for what, n in dropped.items()),
    )


def _sampling(body: Part) -> Sampling:
    stops = body.get("stop_sequences").elements("a list of texts")
    return Sampling(
        temperature=body.get("temperature").number(0, _TEMPERATURE_MAX),
        top_p=body.get("top_p").number(0, 1),
        top_k=body.get("top_k").integer(0) or None,
        stop=tuple(text for stop in stops if (text := stop.text())),
    )


def _thinking(body: Part, dropped: Counter[str]) -> tuple[bool | None, str | None]:
    """Whether to think first, and how hard."""
    effort = body.get("output_config").get("effort").text() or None
    if effort == "none":
        return False, None
    match body.get("thinking").get("type").value:
        case None | "adaptive":
            return None, effort
        case "enabled":
            return True, effort
        case "disabled":
            return False, effort
        case _:
            dropped["thinking of an unknown type"] += 1
            return None, effort


def _json_schema(body: Part, dropped: Counter[str]) -> Mapping[str, Any] | None:
    output_format = body.get("output_config").get("format")
    if output_format.is_absent:
        return None
    if output_format.get("type").value != "json_schema":
        dropped["output format of an unknown type"] += 1
        return None
    schema = output_format.get("schema").mapping("a JSON schema, an object")
    return {} if schema is None else schema


def _is_aside(body: Part, *, has_tools: bool) -> bool:
    """Whether an agent asks beside its conversation, told from the body alone.

    The turns of an agent have tools. Its titles do not, and want JSON; its web searches list only
    tools of other servers. What else has no tools is an aside if it names an agent's session, and
    otherwise a chat.

    The request for a summary before Claude Code compacts is the conversation itself, tools
    included, with one text behind it that forbids calling tools. It still is an aside: the client
    goes on without that text, and recalled into a later prompt it would forbid tools there.
    """
    if has_tools:
        return _last_text(body).startswith(COMPACTION_PROMPT)
    wants_json = body.get("output_config").get("format").get("type").value == "json_schema"
    return wants_json or bool(body.get("tools").value) or _names_a_session(body)


def _names_a_session(body: Part) -> bool:
    match body.get("metadata").value:
        case {"user_id": str(user_id)}:
            pass
        case _:
            return False
    try:
        user: Any = json.loads(user_id)
    except (ValueError, RecursionError):
        return False
    return isinstance(user, dict) and "session_id" in cast("dict[str, Any]", user)


def _last_text(body: Part) -> str:
    match body.get("messages").value[-1]:
        case {"role": "user", "content": str(text)}:
            return text
        case {"role": "user", "content": [*_, {"type": "text", "text": str(text)}]}:
            return text
        case _:
            return ""
