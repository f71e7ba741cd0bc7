"""Text as search terms: made for code and logs, good enough for prose.

A *name* is what stands without blanks and looks like one thing: an identifier, a dotted name, a
file path, a number, a version, a date, an id like ABC-123. It counts whole and in parts, so that
`config` finds `src/app/load_config.py`, and the path finds itself much better. Words that are
everywhere are left to the inverse document frequency.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

# Scripts without blanks between words: kana, Chinese characters, Hangul.
_UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_NAME = rf"[^\W{_UNSPACED}]+"

# Passed over: markers of the chat template with the role they announce, and the letter of an
# escaped line break or tab, as JSON and string literals are full of them.
_ROLES = "system|developer|user|assistant|tool|ipython"
_NOTHING = rf"<[|｜][^<>\s]{{1,40}}[|｜]>(?:(?:{_ROLES})\b)?|\\[nrt]"

_NAMES = re.compile(rf"{_NOTHING}|({_NAME}(?:[./-]{_NAME})*)|([{_UNSPACED}]+)")

_HUMPS = re.compile(r"_+|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_DOTS = re.compile(r"[.-]")

_LONGEST_NAME = 64
"""Characters. What is longer is data: it has no parts that anybody asks for."""


def terms(text: str) -> list[str]:
    """The terms of a text, lower-cased, in order of appearance."""
    return [term for begin, end in names(text) for term in terms_of_name(text[begin:end])]


def names(text: str) -> Iterator[tuple[int, int]]:
    """Where the names of a text are: begin and end in characters.

    In a script without blanks, every two neighbouring characters are a name.
    """
    for match in _NAMES.finditer(text):
        if match.lastindex == 1:
            yield match.span(1)
        elif match.lastindex == 2:
            begin, end = match.span(2)
            if end - begin == 1:
                yield begin, end
            for first in range(begin, end - 1):
                yield first, first + 2


@lru_cache(maxsize=1 << 14)
def terms_of_name(name: str) -> tuple[str, ...]:
    """The distinct terms of one name: the whole, its parts, and singulars of its words."""
    found = [name.lower()]
    if len(name) <= _LONGEST_NAME:
        for piece in name.split("/"):
            found.append(piece.lower())
            for identifier in _DOTS.split(piece):
                found.append(identifier.lower())
                parts = _HUMPS.split(identifier)
                found += [part.lower() for part in parts if len(part) > 1 or part.isdigit()]
    distinct = dict.fromkeys(found)
    distinct.update(dict.fromkeys(_singular(term) for term in tuple(distinct)))
    return tuple(distinct)


def _singular(word: str) -> str:
    """Of a plural; any other word as it is. It only joins the word, so that none is lost."""
    if len(word) < 5 or not word.isalpha() or word.endswith(("ss", "us", "is")):
        return word
    if word.endswith("ies"):
        return word[:-3] + "y"
    return word.removesuffix("s")
