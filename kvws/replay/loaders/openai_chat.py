"""OpenAI-style chat logs: records that hold a message list under "messages" or "traj".

One record, a list of records, or one record per line. A record may also hold:

    response        the completion that answered the list: its message ends the thread
    raw_messages    the list before tool calls were spelled out as text: preferred, because the
                    renderer spells them out in the replayed model's own way
    tools           JSON schemas

Each record is a thread of its own, except that a record which begins with all of its
predecessor's messages is the same conversation one request later.
"""

from __future__ import annotations

import json
from typing import Any

from kvws.chat.message import Message
from kvws.replay.loaders.chat_message import every_reply, read_messages
from kvws.replay.loaders.content import Skipped, clean, is_list, is_mapping, mapping
from kvws.replay.loaders.source import Document
from kvws.replay.trace import Trace, TraceStep

FORMAT = "openai-chat"

_LIST_KEYS = ("raw_messages", "messages", "traj")


def recognises(document: Document) -> bool:
    records = _records(document)
    return bool(records) and all(_entries(record) is not None for record in records)


def load(document: Document, name: str) -> Trace:
    skipped = Skipped()
    if document.cut_lines:
        skipped.note("unfinished last lines skipped", document.cut_lines)
    tools: tuple[dict[str, Any], ...] = ()
    conversations: list[tuple[Message, ...]] = []
    for record in map(mapping, _records(document)):
        messages = read_messages([*(_entries(record) or ()), *_reply(record)], skipped)
        if conversations and messages[: len(conversations[-1])] == conversations[-1]:
            conversations.pop()
        conversations.append(messages)
        if (offered := _tools(record)) != tools and offered:
            if tools:
                skipped.note("changes of the tool schemas ignored")
            tools = tools or offered
    threads = _name_threads(conversations)
    steps: list[TraceStep] = []
    for thread, messages in threads.items():
        steps += every_reply(thread, messages)
    return Trace(
        name=name,
        format=FORMAT,
        threads=threads,
        steps=tuple(steps),
        tools=tools,
        notes=skipped.notes(),
    )


def _name_threads(
    conversations: list[tuple[Message, ...]],
) -> dict[str, tuple[Message, ...]]:
    if len(conversations) == 1:
        return {"main": conversations[0]}
    return {f"conversation-{n}": messages for n, messages in enumerate(conversations, 1)}


def _records(document: Document) -> list[Any]:
    return document.value if is_list(document.value) else document.rows


def _entries(record: object) -> list[Any] | None:
    fields = mapping(record)
    return next((fields[key] for key in _LIST_KEYS if is_list(fields.get(key))), None)


def _reply(record: dict[str, Any]) -> list[Any]:
    choices = mapping(record.get("response")).get("choices")
    first = choices[0] if is_list(choices) and choices else None
    message = mapping(first).get("message")
    return [message] if is_mapping(message) else []


def _tools(record: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    offered = record.get("tools")
    schemas = [tool for tool in offered if is_mapping(tool)] if is_list(offered) else []
    return tuple(json.loads(clean(json.dumps(schemas, ensure_ascii=False))))
