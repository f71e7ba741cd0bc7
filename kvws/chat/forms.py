"""The forms in which a chat template may take a message list, the most faithful first.

    tool calls      objects with parsed arguments, objects with JSON text, or spelled out:
                        assistant   <tool_call>\\n{"name": …, "arguments": …}\\n</tool_call>
                        user        <tool_response>\\n…\\n</tool_response>
    the list        as it came; neighbours of one role merged; system messages as user messages

Apart from that ladder, two things are settled once per template: tool schemas go its own way or
into the system message, and system messages that stand further down stay what they are or become
reminders of the user's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvws.chat.message import Message, ToolCall

Entry = dict[str, Any]
"""A message as `apply_chat_template` takes it."""

_REMINDER = ("<system-reminder>", "</system-reminder>")


@dataclass(frozen=True)
class Form:
    """One way to hand messages to a template.

    Attributes:
        entry_of: a message as an entry.
        arrange: the list of entries as the template wants it.
    """

    entry_of: Callable[[Message], Entry]
    arrange: Callable[[list[Entry]], list[Entry]]

    def entries(self, messages: Sequence[Message]) -> list[Entry]:
        return self.arrange([self.entry_of(message) for message in messages])


def ladder(*, takes_calls: bool, reads_reasoning: bool) -> tuple[Form, ...]:
    """All forms for a template, to be tried in order.

    Args:
        takes_calls: it mentions tool calls.
        reads_reasoning: it mentions the reasoning of earlier turns.
    """
    ways = (_call_parsed, _call_as_text) if takes_calls else ()
    entries = [_entries_with(arguments) for arguments in ways]
    entries.append(_spelled_out)
    if reads_reasoning:
        entries = [_and_reasoning(entry_of) for entry_of in entries]
    return tuple(
        Form(entry_of, arrange)
        for entry_of in entries
        for arrange in (_as_recorded, _merged, _without_system)
    )


def with_tools_spelled_out(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> list[Message]:
    """The messages with the tool schemas in the system message that they begin with."""
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = (
        f"These tools can be called:\n<tools>\n{schemas}\n</tools>\n"
        "A call is written as\n"
        '<tool_call>\n{"name": "…", "arguments": {…}}\n</tool_call>'
    )
    if messages and messages[0].role == "system":
        first = Message("system", f"{messages[0].content}\n\n{text}")
        return [first, *messages[1:]]
    return [Message("system", text), *messages]


def with_reminders(messages: Sequence[Message]) -> list[Message]:
    """The messages with every system message but the first as a reminder in the user's turn."""
    return [
        replace(message, role="user", content=_as_reminder(message.content))
        if message.role == "system" and position
        else message
        for position, message in enumerate(messages)
    ]


def _as_reminder(text: str) -> str:
    opening, closing = _REMINDER
    stripped = text.strip()
    if stripped.startswith(opening) and stripped.endswith(closing):
        return text
    return f"{opening}\n{text}\n{closing}"


def _entries_with(arguments: Callable[[ToolCall], Any]) -> Callable[[Message], Entry]:
    def entry_of(message: Message) -> Entry:
        entry: Entry = {"role": message.role, "content": message.content}
        if message.tool_calls:
            entry["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": arguments(call)},
                }
                for call in message.tool_calls
            ]
        if message.name is not None:
            entry["name"] = message.name
        if message.tool_call_id is not None:
            entry["tool_call_id"] = message.tool_call_id
        return entry

    return entry_of


def _and_reasoning(entry_of: Callable[[Message], Entry]) -> Callable[[Message], Entry]:
    def with_reasoning(message: Message) -> Entry:
        entry = entry_of(message)
        if message.reasoning:
            entry["reasoning_content"] = message.reasoning
        return entry

    return with_reasoning


def _call_parsed(call: ToolCall) -> Any:
    try:
        return json.loads(call.arguments)
    except (ValueError, RecursionError):  # a model may write broken JSON: show it as it is
        return call.arguments


def _call_as_text(call: ToolCall) -> str:
    return call.arguments


def _spelled_out(message: Message) -> Entry:
    role, text = message.role, message.content
    if role == "tool":
        return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
    if message.tool_calls:
        text = "\n".join([text] * bool(text) + [_spelled(call) for call in message.tool_calls])
    return {"role": role, "content": text}


def _spelled(call: ToolCall) -> str:
    body = {"name": call.name, "arguments": _call_parsed(call)}
    return f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>"


def _as_recorded(entries: list[Entry]) -> list[Entry]:
    return entries


def _merged(entries: list[Entry]) -> list[Entry]:
    """Neighbours of one role as one entry; tool answers stay apart, they answer calls by id."""
    merged: list[Entry] = []
    for entry in entries:
        if merged and merged[-1]["role"] == entry["role"] != "tool":
            merged[-1] = _joined(merged[-1], entry)
        else:
            merged.append(entry)
    return merged


def _joined(before: Entry, entry: Entry) -> Entry:
    joined: Entry = {
        "role": entry["role"],
        "content": _paragraphs(before["content"], entry["content"]),
    }
    if calls := [*before.get("tool_calls", ()), *entry.get("tool_calls", ())]:
        joined["tool_calls"] = calls
    if reasoning := _paragraphs(
        before.get("reasoning_content", ""), entry.get("reasoning_content", "")
    ):
        joined["reasoning_content"] = reasoning
    return joined


def _paragraphs(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)


def _without_system(entries: list[Entry]) -> list[Entry]:
    return _merged(
        [{**entry, "role": "user"} if entry["role"] == "system" else entry for entry in entries]
    )
