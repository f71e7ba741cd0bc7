"""Content blocks as text: what a model that reads text only is shown of them."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from kvws.http.anthropic.part import Part

_TYPE_SHOWN_MAX_CHARS = 40
_FIELDS_OF_SERVER_RESULTS = ("title", "url", "stdout", "stderr", "error_code")
_COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_EXPECTED_CONTENT = "a text or a list of content blocks"


def content_blocks(content: Part) -> list[Part]:
    """The blocks of a content; a plain text is one text block.

    Raises:
        BadRequest: the content is neither text nor list, or holds something that is no block.
    """
    if isinstance(content.value, str):
        return [content.standing_for({"type": "text", "text": content.value})]
    blocks = content.elements(_EXPECTED_CONTENT)
    for block in blocks:
        if not isinstance(block.value, dict):
            raise block.refused("a content block, an object")
    return blocks


def joined_text(content: Part, dropped: Counter[str]) -> str:
    """All that can be shown of a content, one block a line. Counts what cannot in `dropped`.

    Raises:
        BadRequest: as `content_blocks`, or a block's own content is of the wrong type.
    """
    if isinstance(content.value, str):
        return content.value
    texts = (shown(block, dropped) for block in content_blocks(content))
    return "\n".join(text for text in texts if text)


def shown(block: Part, dropped: Counter[str]) -> str:
    """What can be shown of one block; "" for nothing. Counts what cannot in `dropped`.

    Raises:
        BadRequest: the block's content is of the wrong type.
    """
    match block.value_of("type"):
        case "text":
            return block.text_of("text")
        case "image":
            return _placeholder("image", block, dropped)
        case "document":
            return _document(block, dropped)
        case "search_result":
            lines = [_string(block, "title"), _string(block, "source")]
            return _lines([*lines, joined_text(block.get("content"), dropped)])
        case "tool_reference":
            return f"[tool {_string(block, 'tool_name')}]"
        case "server_tool_use" | "mcp_tool_use":
            return f"[{_string(block, 'name')} {compact_json(block.get('input').value)}]"
        case str(kind) if kind.endswith("_tool_result"):
            return _server_result(block.get("content"), dropped)
        case kind:
            count_block(kind, dropped)
            return ""


def count_block(kind: object, dropped: Counter[str]) -> None:
    """Note a block that is not shown. Mutates `dropped`."""
    name = ascii(kind[:_TYPE_SHOWN_MAX_CHARS]) if isinstance(kind, str) else "no type"
    dropped[f"block of {name}"] += 1


def compact_json(value: Any) -> str:
    return _COMPACT.encode(value)


def _document(block: Part, dropped: Counter[str]) -> str:
    source = block.get("source")
    match _string(source, "type"):
        case "text":
            text = source.text_of("data")
        case "content":
            text = joined_text(source.get("content"), dropped)
        case _:
            text = _placeholder("document", block, dropped)
    return _lines([_string(block, "title"), _string(block, "context"), text])


def _placeholder(kind: str, block: Part, dropped: Counter[str]) -> str:
    dropped[kind] += 1
    media_type = _string(block.get("source"), "media_type")
    return f"[{f'{media_type} {kind}'.lstrip()}: this model reads text only]"


def _server_result(content: Part, dropped: Counter[str]) -> str:
    """What a tool that ran on another server returned, in whatever shape: the texts in it."""
    match content.value:
        case str():
            return content.text()
        case list():
            return _lines([_server_result(each, dropped) for each in content.elements("")])
        case {"type": "text" | "image" | "document" | "search_result" | "tool_reference"}:
            return shown(content, dropped)
        case dict():
            fields = [_string(content, key) for key in _FIELDS_OF_SERVER_RESULTS]
            return _lines([*fields, _server_result(content.get("content"), dropped)])
        case _:
            return ""


def _string(block: Part, key: str) -> str:
    """A member that decides nothing: anything but text counts as absent."""
    value = block.value_of(key) if isinstance(block.value, dict) else None
    return value if isinstance(value, str) else ""


def _lines(texts: list[str]) -> str:
    return "\n".join(text for text in texts if text)
