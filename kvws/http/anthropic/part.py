"""Reading a decoded JSON body: every value knows where it lies, so that a refusal can say so."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

from kvws.errors import BadRequest

_SHOWN_MAX_CHARS = 40


@dataclass(frozen=True)
class Part:
    """A value inside a request.

    Absent and null are the same: clients send null for what they leave open.

    Attributes:
        value: as the JSON decoder made it.
        path: where it lies, such as "messages.3.content"; "" for the body itself.
    """

    value: Any
    path: str = ""

    @property
    def is_absent(self) -> bool:
        return self.value is None

    def refused(self, expected: str) -> BadRequest:
        """The error that says what stands here instead of `expected`."""
        return BadRequest(
            f"{self.path or 'body'}: cannot use {_described(self.value)}",
            hint=f"expected {expected}",
        )

    def get(self, key: str) -> Part:
        """Member `key` of an object; of an absent object every member is absent.

        Raises:
            BadRequest: this is no object.
        """
        members = self.mapping("an object") or {}
        return Part(members.get(key), f"{self.path}.{key}" if self.path else key)

    def elements(self, expected: str) -> list[Part]:
        """Elements of a list; none where it is absent.

        Raises:
            BadRequest: this is no list.
        """
        value = self.value
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.refused(expected)
        elements = cast("list[Any]", value)
        return [Part(element, f"{self.path}.{i}") for i, element in enumerate(elements)]

    def text(self) -> str:
        """A text; "" where it is absent.

        Raises:
            BadRequest: this is no text.
        """
        if self.is_absent:
            return ""
        if not isinstance(self.value, str):
            raise self.refused("a text")
        return self.value

    def flag(self) -> bool:
        """True or false; false where it is absent.

        Raises:
            BadRequest: this is neither.
        """
        if self.is_absent:
            return False
        if not isinstance(self.value, bool):
            raise self.refused("true or false")
        return self.value

    def mapping(self, expected: str) -> dict[str, Any] | None:
        """An object as it was sent; None where it is absent.

        Raises:
            BadRequest: this is no object.
        """
        value = self.value
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refused(expected)
        return cast("dict[str, Any]", value)

    def integer(self, least: int) -> int | None:
        """A whole number; None where it is absent.

        Raises:
            BadRequest: this is no whole number, or less than `least`.
        """
        if self.is_absent:
            return None
        if type(self.value) is not int or self.value < least:
            raise self.refused(f"a whole number of at least {least}")
        return self.value

    def number(self, least: float, most: float) -> float | None:
        """A number; None where it is absent.

        Raises:
            BadRequest: this is no number, or outside [least, most].
        """
        if self.is_absent:
            return None
        if type(self.value) not in (int, float) or not least <= self.value <= most:
            raise self.refused(f"a number from {least:g} to {most:g}")
        return float(self.value)


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


def _described(value: Any) -> str:
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case dict():
            return "an object"
        case list():
            return "a list"
        case str():
            cut = value[:_SHOWN_MAX_CHARS]
            return ascii(cut + "…" * (len(value) > len(cut)))
        case float() if not math.isfinite(value):
            return "a number that is not finite"
        case _:
            return f"the number {value}"
