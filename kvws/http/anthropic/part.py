"""Reading a decoded JSON body: every value knows where it lies, so that a refusal can say so."""

from __future__ import annotations

import math
from typing import Any, cast

from kvws.errors import BadRequest

_SHOWN_MAX_CHARS = 40


class Part:
    """A value inside a request.

    Absent and null are the same: clients send null for what they leave open. A long history has
    tens of thousands of parts, so paths are spelled out only for a refusal.

    Attributes:
        value: as the JSON decoder made it.
    """

    __slots__ = ("_key", "_parent", "value")

    def __init__(self, value: Any, parent: Part | None = None, key: str | int = "") -> None:
        self.value = value
        self._parent = parent
        self._key = key

    @property
    def path(self) -> str:
        """Where it lies, such as "messages.3.content"; "" for the body itself."""
        if self._parent is None:
            return ""
        above = self._parent.path
        return f"{above}.{self._key}" if above else str(self._key)

    @property
    def is_absent(self) -> bool:
        return self.value is None

    def refused(self, expected: str) -> BadRequest:
        """The error that says what stands here instead of `expected`."""
        return BadRequest(
            f"{self.path or 'body'}: cannot use {_described(self.value)}",
            hint=f"expected {expected}",
        )

    def standing_for(self, value: Any) -> Part:
        """Another spelling of what stands here."""
        return Part(value, self._parent, self._key)

    def get(self, key: str) -> Part:
        """Member `key` of an object; of an absent object every member is absent.

        Raises:
            BadRequest: this is no object.
        """
        value = self.value
        if value is None:
            return Part(None, self, key)
        if type(self.value) is not dict:
            raise self.refused("an object")
        return Part(value.get(key), self, key)

    def value_of(self, key: str) -> Any:
        """The value of member `key`, for those who never refuse it: cheaper than `get`.

        Raises:
            BadRequest: this is no object.
        """
        value = self.value
        if type(self.value) is not dict:
            return self.get(key).value
        return value.get(key)

    def text_of(self, key: str) -> str:
        """The text of member `key`; "" where it is absent.

        Raises:
            BadRequest: this is no object, or its member no text.
        """
        value = self.value_of(key)
        return value if type(value) is str else self.get(key).text()

    def values(self, expected: str) -> list[Any]:
        """Elements of a list as they were sent; none where it is absent.

        Raises:
            BadRequest: this is no list.
        """
        value = self.value
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.refused(expected)
        return cast("list[Any]", value)

    def elements(self, expected: str) -> list[Part]:
        """Elements of a list; none where it is absent.

        Raises:
            BadRequest: this is no list.
        """
        return [Part(element, self, i) for i, element in enumerate(self.values(expected))]

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
