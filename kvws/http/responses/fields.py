"""Fields of a JSON body that may hold anything."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeGuard

from kvws.errors import BadRequest

_MAX_KIND_CHARS = 40


class Dropped(Counter[str]):
    """What of a request no model here can use, and how often it came."""

    def note(self, what: str) -> None:
        """Count one more `what`. Mutates self."""
        self[what] += 1

    def phrases(self) -> tuple[str, ...]:
        return tuple(what if times == 1 else f"{times} x {what}" for what, times in self.items())


def is_mapping(value: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def mapping(value: object) -> Mapping[str, Any]:
    """`value` if it is a JSON object, else an empty one."""
    return value if is_mapping(value) else {}


def string(value: object) -> str:
    """`value` if it is a JSON string, else "". Lone surrogates become U+FFFD."""
    return clean(value) if isinstance(value, str) else ""


def kind_of(value: Mapping[str, Any]) -> str:
    """The `type` of an item, a part or a tool, short enough for a log line."""
    return string(value.get("type"))[:_MAX_KIND_CHARS]


def clean(text: str) -> str:
    """`text` without lone surrogates, which JSON can escape but no tokenizer accepts."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def cleaned(value: Any) -> Any:
    """A JSON value with every string in it clean, object keys included."""
    if isinstance(value, str):
        return clean(value)
    if is_mapping(value):
        return {clean(key): cleaned(item) for key, item in value.items()}
    if is_list(value):
        return [cleaned(item) for item in value]
    return value


def json_text(value: object) -> str:
    """`value` as JSON text."""
    return clean(json.dumps(value, ensure_ascii=False))


def flag(body: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """A field that is true or false; null and absence are `default`.

    Raises:
        BadRequest: it is something else.
    """
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong(name, "true or false", value)
    return value


def number(
    body: Mapping[str, Any], name: str, *, least: float, most: float = math.inf
) -> float | None:
    """A field that is a number from `least` to `most`, or null.

    Raises:
        BadRequest: it is something else.
    """
    value = body.get(name)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most or value == math.inf:
        limits = f"of at least {least:g}" if math.isinf(most) else f"from {least:g} to {most:g}"
        raise wrong(name, f"a number {limits}", value)
    return value


def whole_number(body: Mapping[str, Any], name: str, *, least: int) -> int | None:
    """A field that is a whole number of at least `least`, or null.

    Raises:
        BadRequest: it is something else.
    """
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise wrong(name, f"a whole number of at least {least}", value)
    return value


def wrong(name: str, expected: str, got: object) -> BadRequest:
    """The error for a field that holds something else than it must."""
    shown = json.dumps(got) if isinstance(got, bool | int | float | None) else _kind_of_json(got)
    return BadRequest(f"{name} must be {expected}, not {shown[:_MAX_KIND_CHARS]}")


def _kind_of_json(value: object) -> str:
    if isinstance(value, str):
        return "that string"
    return "a list" if is_list(value) else "an object"
