"""Tools of the Responses API as chat completions spell them, and the way back.

    function                          as it is
    custom: the input is free text    a function with one string argument, `input`
    namespace with tools in it        each tool as <namespace>__<name>
    whatever runs on a server         dropped: there is no such server here

A tool's origin says how its calls are written back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvws.chat.call import ModelCall, ToolChoice
from kvws.http.responses.fields import (
    Dropped,
    cleaned,
    is_list,
    is_mapping,
    json_text,
    kind_of,
    mapping,
    string,
    wrong,
)


@dataclass(frozen=True)
class ToolOrigin:
    """What the client calls a tool.

    Attributes:
        namespace: that it stands in, if any.
        custom: whether its input is free text.
    """

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(frozen=True)
class ResponsesCall(ModelCall):
    """A call together with what only this dialect needs to write its answer.

    Attributes:
        origins: of the tools that the model knows under another name or in another shape.
    """

    origins: Mapping[str, ToolOrigin] = field(default_factory=dict[str, ToolOrigin])


@dataclass(frozen=True)
class Tools:
    """The tools of a request.

    Attributes:
        functions: as chat completions spell them; no two of one name.
        origins: as in ResponsesCall.
    """

    functions: tuple[Mapping[str, Any], ...]
    origins: Mapping[str, ToolOrigin]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tool["function"]["name"] for tool in self.functions)


def flat_name(name: str, namespace: str) -> str:
    """The one name under which the model knows a tool that stands in a namespace, or in none."""
    if not namespace:
        return name
    return f"{namespace.removesuffix('__')}__{name}"


def read_tools(value: object, dropped: Dropped) -> Tools:
    """The tools that the model can be offered. Mutates `dropped`.

    Of two tools that would have the same name the second is dropped: a call of that name could
    not be written back.

    Raises:
        BadRequest: `value` is no list.
    """
    if value is None:
        value = []
    if not is_list(value):
        raise wrong("tools", "a list", value)
    functions: dict[str, Mapping[str, Any]] = {}
    origins: dict[str, ToolOrigin] = {}
    for origin, tool in _usable(value, dropped):
        name = flat_name(origin.name, origin.namespace or "")
        if name in functions:
            dropped.note(f"tool {name[:40]} for the second time")
            continue
        functions[name] = {"type": "function", "function": _function(name, origin, tool)}
        if origin != ToolOrigin(name):
            origins[name] = origin
    return Tools(tuple(functions.values()), origins)


def read_tool_choice(value: object, tools: Tools, dropped: Dropped) -> ToolChoice:
    """Whether tools are called, as the client wants it. Mutates `dropped`.

    Raises:
        BadRequest: a word that is no mode.
    """
    if value is None or value == "auto":
        return ToolChoice()
    if value == "none":
        return ToolChoice("none")
    if value == "required":
        return ToolChoice("required")
    if not is_mapping(value):
        raise wrong("tool_choice", '"auto", "none", "required" or an object', value)
    if kind_of(value) == "allowed_tools":
        return _allowed(value, tools, dropped)
    if (name := _chosen(value, tools)) is not None:
        return ToolChoice("required", name)
    dropped.note(f"tool_choice {kind_of(value) or 'of no type'}")
    return ToolChoice()


def custom_arguments(text: str) -> str:
    """The JSON arguments of a call whose input is free text."""
    return json_text({"input": text})


def custom_input(arguments: str) -> str:
    """The free text in a call's JSON arguments; what isn't JSON is taken to be that text."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = mapping(value).get("input")
    return text if isinstance(text, str) else arguments


def _usable(tools: list[Any], dropped: Dropped) -> Iterator[tuple[ToolOrigin, Mapping[str, Any]]]:
    for tool in map(mapping, tools):
        if kind_of(tool) != "namespace":
            yield from _one(tool, "", dropped)
            continue
        namespace, inner = string(tool.get("name")), tool.get("tools")
        if not namespace or not is_list(inner):
            dropped.note("tool namespace without a name or tools")
            continue
        for each in map(mapping, inner):
            yield from _one(each, namespace, dropped)


def _one(
    tool: Mapping[str, Any], namespace: str, dropped: Dropped
) -> Iterator[tuple[ToolOrigin, Mapping[str, Any]]]:
    kind, name = kind_of(tool), string(tool.get("name"))
    if kind not in ("function", "custom"):
        dropped.note(f"tool of type {kind or 'unknown'}")
    elif not name:
        dropped.note(f"{kind} tool without a name")
    else:
        yield ToolOrigin(name, namespace or None, kind == "custom"), tool


def _function(name: str, origin: ToolOrigin, tool: Mapping[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name}
    if description := string(tool.get("description")):
        function["description"] = description
    if origin.custom:
        function["parameters"] = _free_text(mapping(tool.get("format")))
    elif is_mapping(given := tool.get("parameters")):
        function["parameters"] = cleaned(given)
    else:
        function["parameters"] = {"type": "object", "properties": {}}
    # False is how clients spell the default, and would only cost prompt tokens.
    if tool.get("strict") is True and not origin.custom:
        function["strict"] = True
    return function


def _free_text(text_format: Mapping[str, Any]) -> dict[str, Any]:
    """Schema of the one argument; a grammar is told to the model, which need not follow it."""
    described: dict[str, Any] = {"type": "string"}
    if definition := string(text_format.get("definition")):
        syntax = string(text_format.get("syntax")) or "given"
        described["description"] = f"Text of this {syntax} grammar:\n{definition}"
    return {
        "type": "object",
        "properties": {"input": described},
        "required": ["input"],
        "additionalProperties": False,
    }


def _chosen(choice: Mapping[str, Any], tools: Tools) -> str | None:
    """The tool that a choice names, if the model is offered it."""
    if kind_of(choice) not in ("function", "custom"):
        return None
    name = flat_name(string(choice.get("name")), string(choice.get("namespace")))
    return name if name in tools.names else None


def _allowed(choice: Mapping[str, Any], tools: Tools, dropped: Dropped) -> ToolChoice:
    """A choice among some of the tools. All of them stay in the prompt, which must not change
    from call to call, so a choice among several binds only to call one at all."""
    allowed = choice.get("tools")
    among = [_chosen(mapping(tool), tools) for tool in allowed] if is_list(allowed) else []
    names = {name for name in among if name is not None}
    if choice.get("mode") != "required":
        dropped.note("tool_choice allowed_tools")
        return ToolChoice()
    if len(names) != 1:
        dropped.note("tool_choice allowed_tools among several")
    return ToolChoice("required", names.pop() if len(names) == 1 else None)
