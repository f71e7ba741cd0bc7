"""Digests that tell whether a client sends the same messages again.

A message's digest holds those of all messages before it, so equal digests mean equal histories:
the longest known one is found by looking up digests from the end. Dates (`volatile`) do not
count, nor does the order of keys in what is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from kvws.chat.message import Message, ToolCall
from kvws.chat.volatile import masked

DIGEST_BYTES = 16

_ENCODER = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def tools_digest(tools: Sequence[Mapping[str, Any]]) -> bytes:
    """Digest of the tools, in their order; the first `previous` of a history."""
    return _digest([_canonical(tool) for tool in tools])


def message_digest(previous: bytes, message: Message) -> bytes:
    """Digest of `message` behind the history that `previous` is the digest of."""
    content = message.content
    if message.role in ("system", "user"):
        content = masked(content)
    fields = [
        message.role,
        content,
        message.reasoning,
        *_optional(message.name),
        *_optional(message.tool_call_id),
    ]
    for call in message.tool_calls:
        fields += [call.id, call.name, _arguments(call)]
    return _digest(fields, previous)


def _optional(text: str | None) -> tuple[str, str]:
    return ("absent", "") if text is None else ("present", text)


def _arguments(call: ToolCall) -> str:
    try:
        return _canonical(json.loads(call.arguments))
    except (ValueError, RecursionError):
        return call.arguments


def _canonical(value: Any) -> str:
    return _ENCODER.encode(value)


def _digest(fields: Sequence[str], previous: bytes = b"") -> bytes:
    """Lengths come first, so that no two lists of fields read the same."""
    lengths = ",".join([str(len(field)) for field in fields])
    text = "".join((lengths, ";", *fields))
    return blake2b(
        previous + text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES
    ).digest()
