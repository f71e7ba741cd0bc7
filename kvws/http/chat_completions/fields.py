"""Fields of a JSON body, each checked where it is read.

A path such as "messages.3.content" names a field in what clients are told.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn, TypeGuard

from kvws.errors import BadRequest


def refuse(path: str, problem: str, *, expected: str) -> NoReturn:
    """Raises: BadRequest."""
    raise BadRequest(f"{path}: {problem}", hint=f"send {expected}")


def is_mapping(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def mapping_of(value: object, path: str) -> dict[str, Any]:
    """`value`, a JSON object; null reads as an empty one."""
    if value is None:
        return {}
    if not is_mapping(value):
        refuse(path, f"not an object but {_kind(value)}", expected="a JSON object")
    return value


def list_of(value: object, path: str) -> list[Any]:
    """`value`, a JSON array; null reads as an empty one."""
    if value is None:
        return []
    if not is_list(value):
        refuse(path, f"not a list but {_kind(value)}", expected="a JSON array")
    return value


def text_of(value: object, path: str) -> str | None:
    """`value`, a string or null."""
    if value is None:
        return None
    if not isinstance(value, str):
        refuse(path, f"not text but {_kind(value)}", expected="a string")
    return encodable(value)


def flag_of(value: object, path: str, *, default: bool) -> bool:
    """`value`, true or false; null reads as the default."""
    if value is None:
        return default
    if not isinstance(value, bool):
        refuse(path, f"not a yes or no but {_kind(value)}", expected="true or false")
    return value


def integer_of(value: object, path: str, lowest: int, highest: int) -> int | None:
    """`value`, a whole number within both limits, or null."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        refuse(
            path,
            f"not such a whole number but {_shown(value)}",
            expected=f"a whole number from {lowest} to {highest}",
        )
    return value


def number_of(value: object, path: str, lowest: float, highest: float) -> float | None:
    """`value`, a number within both limits, or null."""
    if value is None:
        return None
    # A NaN is within no limits.
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not lowest <= value <= highest
    ):
        refuse(
            path,
            f"not such a number but {_shown(value)}",
            expected=f"a number from {lowest:g} to {highest:g}",
        )
    return float(value)


def encodable(text: str) -> str:
    """`text` without lone surrogates, which JSON can escape but no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def encodable_copy(value: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy of a JSON object, with its key order, whose texts are all encodable."""
    return json.loads(encodable(json.dumps(value, ensure_ascii=False)))


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a yes or no"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case _:
            return "a list" if is_list(value) else "an object"


def _shown(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _kind(value)
    is_short = isinstance(value, float) or value.bit_length() <= 64
    return str(value) if is_short else "one with far too many digits"
