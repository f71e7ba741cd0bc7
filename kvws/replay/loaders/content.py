"""Message contents as plain text, and accessors for JSON that may have any shape."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, TypeGuard

_TEXT_TYPES = frozenset({"text", "input_text", "output_text"})
_THINKING_TYPES = frozenset({"thinking", "redacted_thinking", "reasoning"})
_MAX_KIND_CHARS = 40


class Skipped(Counter[str]):
    """How often what was left out of a trace."""

    def note(self, what: str, times: int = 1) -> None:
        """Count `what`, a plural phrase such as "progress lines skipped". Mutates self."""
        self[what] += times

    def notes(self) -> tuple[str, ...]:
        return tuple(f"{what}: {times}" for what, times in self.items() if times)


def is_mapping(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def mapping(value: object) -> dict[str, Any]:
    """`value` if it is a JSON object, else an empty one."""
    return value if is_mapping(value) else {}


def is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def string(value: object) -> str:
    """`value` if it is a JSON string, else "". Lone surrogates become U+FFFD."""
    return clean(value) if isinstance(value, str) else ""


def clean(text: str) -> str:
    """`text` without lone surrogates, which JSON can escape but no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def json_text(value: object) -> str:
    """`value` as JSON text; a string is taken to be JSON text already."""
    return clean(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def flatten(content: object, skipped: Skipped) -> str:
    """The text of a message's content: a string, a part, or a list of parts.

    Thinking is dropped; what is not text leaves a placeholder such as "[image]".
    Mutates `skipped`.
    """
    parts: list[Any] = content if is_list(content) else [content]
    texts = (part_text(part, skipped) for part in parts)
    return "\n".join(text for text in texts if text is not None)


def part_text(part: object, skipped: Skipped) -> str | None:
    """The text of one content part, or None where it has none. Mutates `skipped`."""
    if part is None:
        return None
    if isinstance(part, str):
        return clean(part)
    fields = mapping(part)
    kind = string(fields.get("type"))[:_MAX_KIND_CHARS]
    if kind in _TEXT_TYPES or (not kind and "text" in fields):
        return string(fields.get("text"))
    if kind in _THINKING_TYPES:
        skipped.note("thinking blocks dropped")
        return None
    name = "image" if "image" in kind else kind or "unknown"
    skipped.note(f"{name} blocks replaced by placeholders")
    return f"[{name}]"
