"""Whether an assistant turn in a client's history is the one that was generated.

Clients do not keep a turn as it was made. What they do to it, and nothing else, is overlooked:

    text, thoughts  trimmed; blank pieces between their blocks gone
    calls           those that repeat an id are gone
    arguments       keys in another order; keys added whose value says nothing
    strings in it   blanks at the ends of lines gone
    scalars in it   "1" for 1, 1 for "1", "true" for true
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, cast

from kvws.chat.message import Message, ToolCall

_LINE_END = re.compile(r"(\r\n|\n|\r)")


def is_replay_of(generated: Message, replayed: Message) -> bool:
    """Whether `replayed`, which a client sent, is the turn `generated`, which it was given.

    What the turn thought must be the same: a turn without its reasoning is written differently.
    """
    if generated.role != "assistant" or replayed.role != "assistant":
        return False
    if _squeezed(generated.reasoning) != _squeezed(replayed.reasoning):
        return False
    if _squeezed(generated.content) != _squeezed(replayed.content):
        return False
    ours, theirs = _distinct(generated.tool_calls), _distinct(replayed.tool_calls)
    return len(ours) == len(theirs) and all(map(_same_call, ours, theirs))


def _squeezed(text: str) -> str:
    """Without blanks: how a turn's blocks were joined leaves nothing else behind."""
    return "".join(text.split())


def _distinct(calls: Sequence[ToolCall]) -> list[ToolCall]:
    """The first call of each id; those without one are all kept."""
    seen: set[str] = set()
    kept: list[ToolCall] = []
    for call in calls:
        if not call.id or call.id not in seen:
            kept.append(call)
        seen.add(call.id)
    return kept


def _same_call(ours: ToolCall, theirs: ToolCall) -> bool:
    if ours.id and theirs.id and ours.id != theirs.id:
        return False
    return ours.name == theirs.name and _same_arguments(ours.arguments, theirs.arguments)


def _same_arguments(ours: str, theirs: str) -> bool:
    if ours.strip() == theirs.strip():
        return True
    try:
        return _same(json.loads(ours.strip() or "{}"), json.loads(theirs.strip() or "{}"))
    except (ValueError, RecursionError):
        return False


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return _same_objects(cast("dict[str, Any]", ours), cast("dict[str, Any]", theirs))
    if isinstance(ours, list) and isinstance(theirs, list):
        ours, theirs = cast("list[Any]", ours), cast("list[Any]", theirs)
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    if isinstance(ours, str) and isinstance(theirs, str):
        return ours == theirs or _without_line_ends(ours) == theirs
    return _same_scalars(ours, theirs)


def _same_objects(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return all(key in theirs and _same(value, theirs[key]) for key, value in ours.items()) and all(
        _says_nothing(value) for key, value in theirs.items() if key not in ours
    )


def _says_nothing(value: Any) -> bool:
    return value is None or value is False or value == "" or value == [] or value == {}


def _without_line_ends(text: str) -> str:
    lines = _LINE_END.split(text)
    lines[::2] = [line.rstrip() for line in lines[::2]]  # between them, the ends as they were
    return "".join(lines)


def _same_scalars(ours: Any, theirs: Any) -> bool:
    """Equal, of one kind or as text."""
    if isinstance(ours, str) != isinstance(theirs, str):
        ours, theirs = _spelled(ours), _spelled(theirs)
    if isinstance(ours, bool) or isinstance(theirs, bool):
        return ours is theirs
    return ours == theirs


def _spelled(value: Any) -> Any:
    """The number or truth value that a text spells; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        read = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return cast("object", read) if isinstance(read, bool | int | float) else value
