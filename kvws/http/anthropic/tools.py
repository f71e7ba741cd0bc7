"""The tools of a request, and which of them may be called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kvws.chat.call import ToolChoice
from kvws.http.anthropic.part import Part

_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
_TYPE_SHOWN_MAX_CHARS = 40


def read_tools(tools: Part, dropped: Counter[str]) -> tuple[Mapping[str, Any], ...]:
    """Tools that the model can be told about, as chat completions spell them.

    A tool without a schema of its own is one that the vendor's servers run, or whose schema only
    its models know: it is left out, and counted in `dropped`.

    Raises:
        BadRequest: a tool has no name, or a schema that is none.
    """
    functions: list[Mapping[str, Any]] = []
    for tool in tools.elements("a list of tools"):
        name = tool.get("name").text()
        if not name:
            raise tool.get("name").refused("the name of a tool")
        kind = tool.get("type").text()
        schema = tool.get("input_schema").mapping("a JSON schema, an object")
        if schema is None and kind not in ("", "custom"):
            dropped[f"tool of type {kind[:_TYPE_SHOWN_MAX_CHARS]!a}"] += 1
            continue
        description = tool.get("description").text()
        functions.append(
            {
                "type": "function",
                "function": {
                    "name": name,
                    **({"description": description} if description else {}),
                    "parameters": _NO_PARAMETERS if schema is None else schema,
                },
            }
        )
    return tuple(functions)


def read_tool_choice(
    choice: Part, tools: Sequence[Mapping[str, Any]], dropped: Counter[str]
) -> tuple[ToolChoice, bool]:
    """Which of `tools` is called, and whether several calls may be made at once.

    A choice that only a tool left out could meet is open again, and counted in `dropped`.

    Raises:
        BadRequest: the choice is none.
    """
    if choice.is_absent:
        return ToolChoice(), True
    parallel = not choice.get("disable_parallel_tool_use").flag()
    names = {tool["function"]["name"] for tool in tools}
    match choice.get("type").value:
        case "auto":
            return ToolChoice(), parallel
        case "none":
            return ToolChoice("none"), parallel
        case "any":
            if names:
                return ToolChoice("required"), parallel
        case "tool":
            name = choice.get("name").text()
            if not name:
                raise choice.get("name").refused("the name of a tool")
            if name in names:
                return ToolChoice("required", name), parallel
        case _:
            raise choice.get("type").refused('"auto", "any", "tool" or "none"')
    dropped["choice of a tool that cannot be called"] += 1
    return ToolChoice(), parallel
