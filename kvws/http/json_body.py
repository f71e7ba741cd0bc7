"""Request bodies as JSON."""

from __future__ import annotations

import json
from typing import Any, NoReturn, cast

import orjson

from kvws.errors import BadRequest


def decode_json(body: bytes | bytearray) -> Any:
    """The value that a body holds; its texts have no broken surrogate pairs.

    Raises:
        BadRequest: it holds no JSON; says where.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        refusal = BadRequest(
            f"the body is no JSON: {error.msg} at line {error.lineno}, column {error.colno}",
            hint="send one JSON object",
        )
    if b"\\u" not in body:
        raise refusal
    try:  # the slower decoder takes escaped halves of a pair, too
        return mended(json.loads(body, parse_constant=_refuse))
    except (ValueError, RecursionError):
        raise refusal from None


def mended(value: Any) -> Any:
    """`value` with U+FFFD for each half of a broken surrogate pair, which no tokenizer takes.

    JavaScript clients cut long texts between the halves of an emoji.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in value)
        return value
    if isinstance(value, list):
        return [mended(element) for element in cast("list[Any]", value)]
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value)
        return {mended(key): mended(member) for key, member in members.items()}
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
