"""Messages of a request in the one form that all dialects share.

The lists of two requests of one thread must be equal as far as the shorter one reaches, so
whatever clients change between requests without meaning it is lost here: the place of cache
marks, whether a lone text is a list, header lines in the system prompt, blank texts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, cast

from kvws.chat.message import Message, ToolCall
from kvws.http.anthropic.blocks import (
    compact_json,
    content_blocks,
    count_block,
    joined_text,
    shown,
)
from kvws.http.anthropic.markers import HEADER_LINES, NOTHING_SAID, UNPARSED_INPUT
from kvws.http.anthropic.part import Part
from kvws.http.recollection import ReadEntry, Recollection

_SAYS_IT_FAILED = ("error", "<tool_use_error>", "exit code")


def read_messages(
    body: Part, dropped: Counter[str], recollection: Recollection
) -> tuple[Message, ...]:
    """The system prompt, if any, and the messages of a request. Counts what is not shown in
    `dropped`. Mutates `recollection`.

    Raises:
        BadRequest: there are no messages, or one of them is none.
    """
    listed = body.get("messages")
    values = listed.values("a list of messages")
    if not values:
        raise listed.refused("at least one message")
    system = _system_text(body.get("system"), dropped)
    messages = [Message("system", system)] if system else []
    tool_names: dict[str, str] = {}

    def read(index: int, value: Any) -> ReadEntry:
        noted: Counter[str] = Counter()
        read_as = _read_entry(Part(value, listed, index), tool_names, noted)
        return ReadEntry(value, tuple(read_as), tuple(noted.items()))

    for entry in recollection.read(values, read):
        messages += entry.messages
        for what, times in entry.dropped:
            dropped[what] += times
        for message in entry.messages:
            if message.tool_calls:
                tool_names.update((call.id, call.name) for call in message.tool_calls if call.id)
    return tuple(messages)


def _read_entry(
    entry: Part, tool_names: Mapping[str, str], dropped: Counter[str]
) -> Iterable[Message]:
    content = entry.get("content")
    match entry.value_of("role"):
        case "user":
            return _user_messages(content, tool_names, dropped)
        case "assistant":
            return [_assistant_message(content, dropped)]
        case "system":
            return [Message("system", _system_text(content, dropped))]
        case _:
            raise entry.get("role").refused('"user", "assistant" or "system"')


def _system_text(content: Part, dropped: Counter[str]) -> str:
    texts = (_without_headers(shown(block, dropped)) for block in content_blocks(content))
    return "\n".join(text for text in texts if text)


def _without_headers(text: str) -> str:
    headers = HEADER_LINES.match(text)
    return text[headers.end() :] if headers else text


def _user_messages(
    content: Part, tool_names: Mapping[str, str], dropped: Counter[str]
) -> Iterable[Message]:
    """Tool results as messages of their own, in the order sent, with the texts between them."""
    messages: list[Message] = []
    texts: list[str] = []
    for block in content_blocks(content):
        if block.value_of("type") != "tool_result":
            texts.append(shown(block, dropped))
            continue
        if any(texts):
            messages.append(_user_message(texts))
        texts = []
        messages.append(_tool_message(block, tool_names, dropped))
    if any(texts) or not messages:
        messages.append(_user_message(texts))
    return messages


def _user_message(texts: list[str]) -> Message:
    return Message("user", "\n".join(text for text in texts if text))


def _tool_message(block: Part, tool_names: Mapping[str, str], dropped: Counter[str]) -> Message:
    text = joined_text(block.get("content"), dropped)
    failed = block.value_of("is_error") is not None and block.get("is_error").flag()
    if failed and not text.lower().startswith(_SAYS_IT_FAILED):
        # The form that models read has no other place to say that a call failed.
        text = f"Error: {text}" if text else "Error"
    call_id = block.text_of("tool_use_id")
    return Message("tool", text, name=tool_names.get(call_id), tool_call_id=call_id or None)


def _assistant_message(content: Part, dropped: Counter[str]) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block in content_blocks(content):
        match block.value_of("type"):
            case "text":
                text = block.text_of("text")
                if text.strip() and text != NOTHING_SAID:
                    texts.append(text)
            case "thinking":
                thoughts.append(block.text_of("thinking"))
            case "redacted_thinking":
                count_block("redacted_thinking", dropped)
            case "tool_use":
                calls.append(_tool_call(block))
            case _:
                # Text blocks of one turn continue each other; these stand apart from them.
                if text := shown(block, dropped):
                    texts.append(f"\n{text}\n")
    return Message(
        "assistant",
        "".join(texts),
        tool_calls=_without_repeats(calls),
        reasoning="\n".join(thought for thought in thoughts if thought),
    )


def _tool_call(block: Part) -> ToolCall:
    name = block.text_of("name")
    if not name:
        raise block.get("name").refused("the name of a tool")
    return ToolCall(block.text_of("id"), name, _arguments(block.value_of("input")))


def _arguments(value: Any) -> str:
    """The arguments of a call as JSON text; broken JSON only where the model wrote it so."""
    if value is None or value == "":
        return "{}"
    if isinstance(value, str):
        return value if _is_json(value) else compact_json(value)
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value)
        match members.get(UNPARSED_INPUT):
            case {"raw": str(raw), "len": int(chars)} if len(members) == 1 and len(raw) == chars:
                return raw
            case _:
                pass
    return compact_json(value)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _without_repeats(calls: list[ToolCall]) -> tuple[ToolCall, ...]:
    """Calls of which no two share an id: clients drop the later one. "" is no id."""
    seen: set[str] = set()
    kept: list[ToolCall] = []
    for call in calls:
        if call.id not in seen:
            kept.append(call)
        if call.id:
            seen.add(call.id)
    return tuple(kept)
