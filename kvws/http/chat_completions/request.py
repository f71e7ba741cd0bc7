"""A chat-completions body, read into a `ModelCall`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kvws.chat.call import ModelCall, Sampling, ToolChoice
from kvws.errors import BadRequest
from kvws.http.chat_completions.fields import (
    encodable,
    encodable_copy,
    flag_of,
    integer_of,
    is_mapping,
    list_of,
    mapping_of,
    number_of,
    refuse,
    text_of,
)
from kvws.http.chat_completions.messages import read_messages
from kvws.http.recollection import Recollection

_MAX_TOKENS = 1 << 31
_MAX_STOPS = 16
_MAX_SEED = (1 << 63) - 1
_NO_EFFORT = "none"
_WITHOUT_EFFECT = (
    *("logprobs", "top_logprobs", "logit_bias", "audio", "modalities", "prediction"),
    *("web_search_options", "verbosity", "regex", "ebnf", "min_tokens", "ignore_eos"),
)
_THINKING_SWITCHES = ("thinking", "enable_thinking")


def read_call(body: object, recollection: Recollection) -> ModelCall:
    """The call in a decoded JSON body. Mutates `recollection`.

    A client that is known to send tools asks for an aside when it sends none: OpenHands' condenser
    does so under the session's `prompt_cache_key`. So does a call without tools whose answer must
    follow a schema. Log probabilities are left out of the answer rather than refused: agents that
    ask for them do without.

    Raises:
        BadRequest: it is no call; says which part, and what is expected.
    """
    if not is_mapping(body):
        refuse("body", "not an object", expected="a JSON object with a list of messages")
    try:
        return _read(body, recollection)
    except RecursionError as error:
        raise BadRequest("body: nested too deeply", hint="send flatter JSON schemas") from error


def _read(body: dict[str, Any], recollection: Recollection) -> ModelCall:
    dropped: Counter[str] = Counter()
    if integer_of(body.get("n"), "n", 1, _MAX_TOKENS) not in (None, 1):
        refuse("n", "one answer is given at a time", expected="n = 1, or the call several times")
    stream = flag_of(body.get("stream"), "stream", default=False)
    stream_options = mapping_of(body.get("stream_options"), "stream_options")
    usage = flag_of(
        stream_options.get("include_usage"), "stream_options.include_usage", default=False
    )
    tools = _tools(body, dropped)
    json_schema = _json_schema(body)
    thinking, effort = _thinking(body, dropped)
    offers_tools = bool(body.get("tools") or body.get("functions"))
    dropped.update(f"{key} ignored" for key in _WITHOUT_EFFECT if body.get(key))
    return ModelCall(
        model=text_of(body.get("model"), "model") or "",
        messages=read_messages(body.get("messages"), dropped, recollection),
        tools=tools,
        tool_choice=_tool_choice(body, tools, dropped),
        parallel_tool_calls=flag_of(
            body.get("parallel_tool_calls"), "parallel_tool_calls", default=True
        ),
        max_tokens=_max_tokens(body),
        sampling=_sampling(body, dropped),
        thinking=thinking,
        effort=effort,
        json_schema=json_schema,
        stream=stream,
        include_usage=usage or not stream,
        side_call=not offers_tools and bool(body.get("prompt_cache_key") or json_schema),
        dropped=tuple(f"{what}: {times}" for what, times in dropped.items()),
    )


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    keys = ("max_completion_tokens", "max_tokens")
    given = (integer_of(body.get(key), key, 1, _MAX_TOKENS) for key in keys)
    return next((tokens for tokens in given if tokens is not None), None)


def _sampling(body: Mapping[str, Any], dropped: Counter[str]) -> Sampling:
    temperature = number_of(body.get("temperature"), "temperature", 0, 2)
    top_p = number_of(body.get("top_p"), "top_p", 0, 1)
    top_k = integer_of(body.get("top_k"), "top_k", -1, _MAX_TOKENS)
    penalty = number_of(body.get("repetition_penalty"), "repetition_penalty", 0, 2)
    if penalty == 0:
        refuse("repetition_penalty", "not above 0", expected="a number above 0, up to 2")
    return Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=-1 if top_k == 0 else top_k,  # two ways to say: all tokens
        min_p=number_of(body.get("min_p"), "min_p", 0, 1),
        frequency_penalty=number_of(body.get("frequency_penalty"), "frequency_penalty", -2, 2),
        presence_penalty=number_of(body.get("presence_penalty"), "presence_penalty", -2, 2),
        repetition_penalty=penalty,
        seed=integer_of(body.get("seed"), "seed", -_MAX_SEED - 1, _MAX_SEED),
        stop=_stops(body.get("stop"), dropped),
    )


def _stops(value: object, dropped: Counter[str]) -> tuple[str, ...]:
    given: list[Any] = [value] if isinstance(value, str) else list_of(value, "stop")
    if len(given) > _MAX_STOPS:
        refuse("stop", f"{len(given)} texts", expected=f"at most {_MAX_STOPS} texts")
    stops: list[str] = []
    for index, stop in enumerate(given):
        if not isinstance(stop, str):
            refuse(f"stop.{index}", "not text", expected="a string")
        if stop:
            stops.append(encodable(stop))
        else:
            dropped["empty stop texts ignored"] += 1
    return tuple(stops)


def _thinking(body: Mapping[str, Any], dropped: Counter[str]) -> tuple[bool | None, str | None]:
    """(whether to think, how hard); an effort of "none" is a way to say: not at all."""
    effort = text_of(body.get("reasoning_effort"), "reasoning_effort") or None
    thinking = False if effort == _NO_EFFORT else None
    switches = mapping_of(body.get("chat_template_kwargs"), "chat_template_kwargs")
    for key in switches.keys() - set(_THINKING_SWITCHES):
        dropped[f"chat_template_kwargs.{encodable(key)[:80]!r} ignored"] += 1
    for key in _THINKING_SWITCHES:
        if isinstance(switch := switches.get(key), bool):
            thinking = switch
    return thinking, None if effort == _NO_EFFORT else effort


def _json_schema(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    wanted = mapping_of(body.get("response_format"), "response_format")
    match wanted.get("type"):
        case None | "text":
            return None
        case "json_object":
            return {}
        case "json_schema":
            path = "response_format.json_schema"
            holder = mapping_of(wanted.get("json_schema"), path)
            return encodable_copy(mapping_of(holder.get("schema"), f"{path}.schema"))
        case _:
            refuse("response_format.type", "unknown", expected="text, json_object or json_schema")


def _tools(body: Mapping[str, Any], dropped: Counter[str]) -> tuple[Mapping[str, Any], ...]:
    """Tools that the model can call; what caches are told about them is left out."""
    tools: list[Mapping[str, Any]] = []
    for index, value in enumerate(list_of(body.get("tools"), "tools")):
        tool = mapping_of(value, f"tools.{index}")
        kind = text_of(tool.get("type"), f"tools.{index}.type") or "function"
        if kind != "function":
            dropped[f"tools of type {kind[:80]!r} dropped"] += 1
            continue
        tools.append(_function(tool.get("function"), f"tools.{index}.function"))
    for index, value in enumerate(list_of(body.get("functions"), "functions")):
        tools.append(_function(value, f"functions.{index}"))
    return tuple(tools)


def _function(value: object, path: str) -> Mapping[str, Any]:
    function = mapping_of(value, path)
    name = function.get("name")
    if not isinstance(name, str) or not name:
        refuse(f"{path}.name", "missing", expected="the name that the model calls it by")
    kept = {key: part for key, part in function.items() if key != "cache_control"}
    return {"type": "function", "function": encodable_copy(kept)}


def _tool_choice(
    body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]], dropped: Counter[str]
) -> ToolChoice:
    path = "tool_choice" if body.get("tool_choice") is not None else "function_call"
    value = body.get(path)
    if is_mapping(value):
        if value.get("type") != "allowed_tools":
            return _named_tool(value, path, tools)
        value = mapping_of(value.get("allowed_tools"), f"{path}.allowed_tools").get("mode")
        dropped["lists of allowed tools ignored"] += 1
    match value:
        case None | "auto":
            return ToolChoice("auto")
        case "none":
            return ToolChoice("none")
        case "required" if tools:
            return ToolChoice("required")
        case "required":
            dropped["required tool calls ignored where there are no tools"] += 1
            return ToolChoice("auto")
        case _:
            refuse(path, "unknown", expected="auto, none, required or a function by name")


def _named_tool(
    choice: Mapping[str, Any], path: str, tools: Sequence[Mapping[str, Any]]
) -> ToolChoice:
    named = choice if path == "function_call" else choice.get("function")
    name = mapping_of(named, f"{path}.function").get("name")
    if not isinstance(name, str) or all(tool["function"]["name"] != name for tool in tools):
        refuse(f"{path}.function.name", "no such tool", expected="the name of one of the tools")
    return ToolChoice("required", name)
