"""The message list of a chat-completions body.

What clients write in several ways reads the same: a text and a list of one text part, a missing,
a null and an empty content, `reasoning_content` and `reasoning`, a tool's name given or not.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from kvws.chat.message import Message, Role, ToolCall
from kvws.http.chat_completions.fields import (
    encodable,
    is_list,
    is_mapping,
    list_of,
    mapping_of,
    refuse,
    text_of,
)
from kvws.http.recollection import ReadEntry, Recollection

_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXT_PARTS = ("text", "input_text", "output_text")
_SHOWN_AS_PLACEHOLDER = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "file": "file",
    "input_file": "file",
    "input_audio": "audio",
    "audio": "audio",
    "video_url": "video",
}
_MAX_NAME_CHARS = 80


def read_messages(
    value: object, dropped: Counter[str], recollection: Recollection
) -> tuple[Message, ...]:
    """The messages of a body, one for one. Mutates `dropped` and `recollection`.

    Raises:
        BadRequest: no list, an empty one, or an entry that is no message.
    """
    entries = list_of(value, "messages")
    if not entries:
        refuse("messages", "missing or empty", expected="at least one message")
    tool_names: dict[str, str] = {}

    def read(index: int, entry: Any) -> ReadEntry:
        path = f"messages.{index}"
        if not is_mapping(entry):
            refuse(path, "not an object", expected="an object with a role and a content")
        noted: Counter[str] = Counter()
        message = _read_message(entry, path, tool_names, noted)
        return ReadEntry(entry, (message,), tuple(noted.items()))

    messages: list[Message] = []
    for entry in recollection.read(entries, read):
        messages += entry.messages
        for what, times in entry.dropped:
            dropped[what] += times
        for message in entry.messages:
            if message.tool_calls:
                tool_names.update((call.id, call.name) for call in message.tool_calls)
    return tuple(messages)


def _read_message(
    entry: dict[str, Any], path: str, tool_names: Mapping[str, str], dropped: Counter[str]
) -> Message:
    said_role = entry.get("role")
    role = _ROLES.get(said_role) if isinstance(said_role, str) else None
    if role is None:
        refuse(f"{path}.role", "missing or unknown", expected="one of " + ", ".join(_ROLES))
    parts = _texts(entry.get("content"), f"{path}.content", dropped)
    if role == "assistant":
        refusal = text_of(entry.get("refusal"), f"{path}.refusal")
        return Message(
            role,
            "".join([*parts, refusal or ""]),  # pieces of one generated text
            tool_calls=tuple(_tool_calls(entry, path, dropped)),
            reasoning=_reasoning(entry, path),
        )
    content = "\n".join(parts)
    if role == "tool":
        call_id = text_of(entry.get("tool_call_id"), f"{path}.tool_call_id") or None
        name = text_of(entry.get("name"), f"{path}.name") or tool_names.get(call_id or "")
        return Message(role, content, name=name or None, tool_call_id=call_id)
    return Message(role, content)


def _texts(content: object, path: str, dropped: Counter[str]) -> list[str]:
    if content is None or isinstance(content, str):
        return [encodable(content or "")]
    if not is_list(content):
        refuse(path, "neither text nor a list", expected="a string, null or a list of parts")
    texts = (_part_text(part, f"{path}.{n}", dropped) for n, part in enumerate(content))
    return [text for text in texts if text is not None]


def _part_text(part: object, path: str, dropped: Counter[str]) -> str | None:
    """The text that stands for a content part; None where nothing can."""
    if isinstance(part, str):
        return encodable(part)
    if not is_mapping(part):
        refuse(path, "not a content part", expected='an object such as {"type": "text", …}')
    kind = part.get("type")
    if kind in _TEXT_PARTS or (kind is None and "text" in part):
        return text_of(part.get("text"), f"{path}.text") or ""
    if kind == "refusal":
        return text_of(part.get("refusal"), f"{path}.refusal") or ""
    if isinstance(kind, str) and kind in _SHOWN_AS_PLACEHOLDER:
        dropped[f"{_SHOWN_AS_PLACEHOLDER[kind]} parts shown as placeholders"] += 1
        return f"[{_described(part, _SHOWN_AS_PLACEHOLDER[kind])}: this model reads text only]"
    dropped[f"content parts of type {str(kind)[:_MAX_NAME_CHARS]!r} skipped"] += 1
    return None


def _described(part: Mapping[str, Any], kind: str) -> str:
    """What a part holds, as far as it says so beside its data: "image/png image", "file a.pdf"."""
    if kind == "image":
        source: object = part.get("image_url")
        url = source.get("url") if is_mapping(source) else source
        head = url[:_MAX_NAME_CHARS] if isinstance(url, str) else ""
        media_type = head.removeprefix("data:").partition(";")[0]
        is_inline = head.startswith("data:image/") and ";" in head
        return f"{encodable(media_type)} image" if is_inline else "image"
    held = part.get("file")
    name = (held if is_mapping(held) else part).get("filename")
    return f"{kind} {encodable(name[:_MAX_NAME_CHARS])}" if isinstance(name, str) else kind


def _reasoning(entry: Mapping[str, Any], path: str) -> str:
    keys = ("reasoning_content", "reasoning")
    texts = (text_of(entry.get(key), f"{path}.{key}") for key in keys)
    return next((text for text in texts if text), "")


def _tool_calls(entry: Mapping[str, Any], path: str, dropped: Counter[str]) -> Iterable[ToolCall]:
    for index, value in enumerate(list_of(entry.get("tool_calls"), f"{path}.tool_calls")):
        call_path = f"{path}.tool_calls.{index}"
        call = mapping_of(value, call_path)
        if call.get("type") not in (None, "function"):
            dropped["tool calls that call no function skipped"] += 1
            continue
        function = mapping_of(call.get("function"), f"{call_path}.function")
        call_id = text_of(call.get("id"), f"{call_path}.id")
        yield _tool_call(call_id or "", function, f"{call_path}.function")
    if legacy := mapping_of(entry.get("function_call"), f"{path}.function_call"):
        yield _tool_call("", legacy, f"{path}.function_call")


def _tool_call(call_id: str, function: Mapping[str, Any], path: str) -> ToolCall:
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        given = mapping_of(arguments, f"{path}.arguments")
        arguments = json.dumps(given, ensure_ascii=False, separators=(",", ":"))
    # A call without arguments comes back with an empty text from some clients.
    name = text_of(function.get("name"), f"{path}.name")
    return ToolCall(call_id, name or "", encodable(arguments) or "{}")
