"""Input items of the Responses API as messages.

    instructions, developer, system     a system message, where it stands
    user                                a user message
    reasoning, message, function_call…  one assistant turn for as long as they follow one another
    function_call_output…               a tool message
    web_search_call, item_reference…    skipped and counted; they part no turn

An assistant turn comes as several items because its answer was written so; taken together
again, its text is what the model generated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvws.chat.message import Message, Role, ToolCall
from kvws.http.recollection import ReadEntry, Recollection
from kvws.http.responses.fields import (
    Dropped,
    clean,
    is_list,
    is_mapping,
    json_text,
    kind_of,
    mapping,
    string,
    wrong,
)
from kvws.http.responses.tools import custom_arguments, flat_name

_ROLES: Mapping[str, Role] = {"user": "user", "system": "system", "developer": "system"}
_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
_UNSEEN_PARTS: Mapping[str, str] = {
    "input_image": "image",
    "input_file": "file",
    "input_audio": "audio",
}


def read_messages(
    instructions: object, items: object, dropped: Dropped, recollection: Recollection
) -> tuple[Message, ...]:
    """The message list in a request. Mutates `dropped` and `recollection`.

    Raises:
        BadRequest: `items` is neither a string nor a list, or `instructions` is neither a string,
            a list nor null.
    """
    reader = _Reader(dropped)
    if is_list(instructions):
        # Their last turn may go on in the input, which then reads otherwise than behind a text.
        recollection = Recollection()
        reader.add(instructions, recollection)
    elif isinstance(instructions, str):
        reader.messages += [Message("system", clean(instructions))] if instructions else []
    elif instructions is not None:
        raise wrong("instructions", "a string", instructions)
    if is_list(items):
        reader.add(items, recollection)
    elif not isinstance(items, str):
        raise wrong("input", "a string or a list of items", items)
    reader.finish()
    if isinstance(items, str):
        reader.messages.append(Message("user", clean(items)))
    return tuple(reader.messages)


@dataclass
class _Turn:
    """An assistant's turn that may go on."""

    reasoning: list[str] = field(default_factory=list[str])
    texts: list[str] = field(default_factory=list[str])
    calls: list[ToolCall] = field(default_factory=list[ToolCall])

    def message(self) -> Message:
        return Message(
            "assistant",
            "".join(self.texts),
            tool_calls=tuple(self.calls),
            reasoning="".join(self.reasoning),
        )


class _Reader:
    """The assistant turn that is still open, and what came of the item that is being read.

    Attributes:
        messages: so far.
    """

    def __init__(self, dropped: Dropped) -> None:
        self.messages: list[Message] = []
        self._all_dropped = dropped
        self._tool_names: dict[str, str] = {}
        self._turn: _Turn | None = None
        self._said: list[Message] = []
        self._dropped = Dropped()

    def add(self, items: list[Any], recollection: Recollection) -> None:
        """More items, behind those that came before. Mutates `recollection`."""
        for entry in recollection.read(items, self._read):
            self.messages += entry.messages
            for what, times in entry.dropped:
                self._all_dropped[what] += times
            for message in entry.messages:
                for call in message.tool_calls:
                    self._name(call)

    def finish(self) -> None:
        """No item comes any more."""
        self._end_turn()
        self.messages += self._said

    def _read(self, _index: int, item: Any) -> ReadEntry:
        self._add(mapping(item))
        said, dropped = tuple(self._said), tuple(self._dropped.items())
        self._said.clear()
        self._dropped.clear()
        return ReadEntry(item, said, dropped, is_open=self._turn is not None)

    def _add(self, item: Mapping[str, Any]) -> None:
        kind = kind_of(item)
        if kind == "message" or (not kind and "role" in item):
            self._add_message(item)
        elif kind == "reasoning":
            self._add_reasoning(item)
        elif kind in ("function_call", "custom_tool_call", "local_shell_call"):
            self._add_call(kind, item)
        elif kind in (
            "function_call_output",
            "custom_tool_call_output",
            "local_shell_call_output",
        ):
            self._add_output(item)
        else:
            self._dropped.note(f"input item {kind or 'of no type'}")

    def _end_turn(self) -> None:
        if self._turn is not None:
            self._said.append(self._turn.message())
            self._turn = None

    def _open_turn(self) -> _Turn:
        if self._turn is None:
            self._turn = _Turn()
        return self._turn

    def _add_message(self, item: Mapping[str, Any]) -> None:
        role, content = item.get("role"), item.get("content")
        if role == "assistant":
            self._open_turn().texts.append(_text(content, "", self._dropped))
        elif isinstance(role, str) and role in _ROLES:
            self._end_turn()
            self._said.append(Message(_ROLES[role], _text(content, "\n", self._dropped)))
        else:
            self._dropped.note("message of an unknown role")

    def _add_reasoning(self, item: Mapping[str, Any]) -> None:
        """Its full text where the client kept it, else its summary."""
        for name in ("content", "summary"):
            if text := _text(item.get(name), "\n\n", self._dropped):
                self._open_turn().reasoning.append(text)
                return
        self._dropped.note("reasoning without readable text")

    def _add_call(self, kind: str, item: Mapping[str, Any]) -> None:
        name = flat_name(string(item.get("name")), string(item.get("namespace")))
        if kind == "custom_tool_call":
            arguments = custom_arguments(string(item.get("input")))
        elif kind == "local_shell_call":
            name, arguments = "local_shell", json_text(mapping(item.get("action")))
        else:
            arguments = _arguments(item.get("arguments"))
        if not name:
            self._dropped.note("tool call without a name")
            return
        call = ToolCall(_call_id(item), name, arguments)
        self._open_turn().calls.append(call)
        self._name(call)

    def _name(self, call: ToolCall) -> None:
        if call.id:
            self._tool_names[call.id] = call.name

    def _add_output(self, item: Mapping[str, Any]) -> None:
        self._end_turn()
        call_id = _call_id(item)
        self._said.append(
            Message(
                "tool",
                _output_text(item.get("output"), self._dropped),
                name=self._tool_names.get(call_id),
                tool_call_id=call_id or None,
            )
        )


def _call_id(item: Mapping[str, Any]) -> str:
    return string(item.get("call_id")) or string(item.get("id"))


def _arguments(value: object) -> str:
    if value is None or value == "":
        return "{}"
    return clean(value) if isinstance(value, str) else json_text(value)


def _output_text(output: object, dropped: Dropped) -> str:
    if is_mapping(output):
        if "content" not in output:
            return json_text(output)
        output = output["content"]
    return _text(output, "\n", dropped)


def _text(content: object, separator: str, dropped: Dropped) -> str:
    """The text of a content: a string, a list of parts, or nothing. Mutates `dropped`."""
    if content is None or isinstance(content, str):
        return string(content)
    if not is_list(content):
        return json_text(content)
    parts = (_part_text(part, dropped) for part in content)
    return separator.join(part for part in parts if part is not None)


def _part_text(part: object, dropped: Dropped) -> str | None:
    """The text of one part; a placeholder for what the model cannot see; else None."""
    if isinstance(part, str):
        return clean(part)
    fields = mapping(part)
    kind = kind_of(fields)
    if kind in _TEXT_PARTS:
        return string(fields.get("text"))
    if kind == "refusal":
        return string(fields.get("refusal"))
    if kind in _UNSEEN_PARTS:
        dropped.note(f"content part {kind} replaced by a placeholder")
        file_name = string(fields.get("filename"))
        return f"[{_UNSEEN_PARTS[kind]}{' ' if file_name else ''}{file_name}]"
    dropped.note(f"content part {kind or 'of no type'}")
    return None
