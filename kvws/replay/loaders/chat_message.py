"""One OpenAI-style chat message, as several recorders write it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvws.chat.message import Message, Role, ToolCall
from kvws.replay.loaders.content import (
    Skipped,
    flatten,
    is_list,
    json_text,
    mapping,
    string,
)
from kvws.replay.trace import TraceStep

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


def read_messages(entries: Iterable[object], skipped: Skipped) -> tuple[Message, ...]:
    """The messages among `entries`; others are counted. Mutates `skipped`."""
    messages: list[Message] = []
    tool_names: dict[str, str] = {}
    for entry in entries:
        message = _read_message(mapping(entry), tool_names, skipped)
        if message is None:
            skipped.note("entries without a known role skipped")
        else:
            messages.append(message)
    return tuple(messages)


def every_reply(thread: str, messages: tuple[Message, ...]) -> tuple[TraceStep, ...]:
    """One step per assistant message that something stands before."""
    return tuple(
        TraceStep(thread, index)
        for index, message in enumerate(messages)
        if index and message.role == "assistant"
    )


def _read_message(
    entry: dict[str, Any], tool_names: dict[str, str], skipped: Skipped
) -> Message | None:
    role = _ROLES.get(string(entry.get("role")))
    if role is None:
        return None
    content = flatten(entry.get("content"), skipped)
    if role == "assistant":
        calls = tuple(_tool_calls(entry))
        tool_names.update((call.id, call.name) for call in calls)
        return Message(role, content, tool_calls=calls)
    if role == "tool":
        call_id = string(entry.get("tool_call_id")) or None
        name = string(entry.get("name")) or tool_names.get(call_id or "")
        return Message(role, content, name=name, tool_call_id=call_id)
    return Message(role, content)


def _tool_calls(entry: dict[str, Any]) -> Iterable[ToolCall]:
    recorded = entry.get("tool_calls")
    for call in recorded if is_list(recorded) else ():
        function = mapping(mapping(call).get("function"))
        yield _tool_call(string(mapping(call).get("id")), function)
    if legacy := mapping(entry.get("function_call")):
        yield _tool_call("", legacy)


def _tool_call(call_id: str, function: dict[str, Any]) -> ToolCall:
    arguments = function.get("arguments")
    return ToolCall(
        id=call_id,
        name=string(function.get("name")),
        arguments=json_text({} if arguments is None else arguments),
    )
