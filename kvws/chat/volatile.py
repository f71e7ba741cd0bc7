"""What clients write into early messages and change from day to day: the date.

A known message that differs only in such a value keeps its tokens; the new value is told at the
end of the prompt. Only whole lines that clients are known to write count as such, and only in
what the client itself says: the output of a tool is never touched.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_WORD = r"(?:[A-Z][a-z]{2,8}|[AP]M|UTC|GMT)"
_VALUE = rf"(?=[^\n]{{0,60}}\b\d{{4}})(?:{_WORD}|[\dTZ:/+., ()-]){{3,64}}?"
_LINE = re.compile(
    rf"""
    ^[ \t]*
    (?:
        (?:Today's\ date(?:\ is(?:\ now)?:?|:)|[Cc]urrent\ date:)\ (?P<date>{_VALUE})\.?
      | <current_date>(?P<tagged>{_VALUE})</current_date>
      | The\ current\ date\ and\ time\ is:?\ (?P<time>{_VALUE})\.?
    )
    [ \t]*$
    """,
    re.MULTILINE | re.VERBOSE,
)
_MARKERS = ("Today's date", "urrent date", "<current_date>")
_KINDS = {"date": "date", "tagged": "date", "time": "date and time"}


def facts(text: str) -> dict[str, str]:
    """The volatile values that `text` states, by kind ("date", "date and time"); the last of a
    kind counts."""
    if not _may_state_any(text):
        return {}
    found: dict[str, str] = {}
    for line in _LINE.finditer(text):
        group = _group(line)
        found[_KINDS[group]] = line[group]
    return found


def masked(text: str) -> str:
    """`text` with every volatile value replaced by the name of its kind."""
    return _LINE.sub(_with_kind, text) if _may_state_any(text) else text


def reminder(changed: Mapping[str, str]) -> str:
    """The sentences that tell the model the values which have changed, by kind; at least one."""
    assert changed
    return " ".join(
        f"The {kind} given above is no longer right: the {kind} is now {value}."
        for kind, value in changed.items()
    )


def _may_state_any(text: str) -> bool:
    # Long texts pass through here at every step, and one search is cheaper than several.
    return "date" in text and any(marker in text for marker in _MARKERS)


def _group(line: re.Match[str]) -> str:
    assert line.lastgroup is not None  # every alternative has a group of its own
    return line.lastgroup


def _with_kind(line: re.Match[str]) -> str:
    group = _group(line)
    begin, end = (position - line.start() for position in line.span(group))
    return f"{line[0][:begin]}<{_KINDS[group]}>{line[0][end:]}"
