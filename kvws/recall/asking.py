"""Whether a person asks for something, or an agent is shown what a tool found. A pure decision.

A person asks with a question mark, or gives an order. What a tool found comes in a message of
another role, or in the user's name, but wrapped: in tags, in brackets, before a shell's prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvws.recall.text.spelling import Spelling

_QUESTION_MARKS = "?？؟"
_WRAPPED_FROM = "<[{"
_WRAPPED_TO = ">]}$#"


def asks(question: Sequence[int], own: npt.NDArray[np.uint8], spelling: Spelling) -> bool:
    """Whether the last message of a question is one in which a person asks for something.

    Args:
        question: token ids.
        own: [tokens] 1 where one is not the chat template's.
    """
    begin = _users_message(question, spelling)
    said = np.flatnonzero(own)
    if begin is None or not len(said) or said[-1] < begin:
        return False
    # Wrappers may be the template's markers, which are nobody's own, so they are looked at, too.
    first = begin if begin else int(said[0])
    text = spelling.decode(question[first : int(said[-1]) + 1]).strip()
    if not text or text[-1] in _QUESTION_MARKS:
        return bool(text)
    return text[0] not in _WRAPPED_FROM and text[-1] not in _WRAPPED_TO


def _users_message(question: Sequence[int], spelling: Spelling) -> int | None:
    """Where the text of the last message begins, if it may be of the user's; None if it is not."""
    if not spelling.user_opening:
        return 0
    begin = _last(question, spelling.user_opening)
    behind = 0 if begin is None else begin + len(spelling.user_opening)
    rest = question[behind:]
    rest = rest[: _last(rest, spelling.opening)]  # behind the opening there is no message yet
    if spelling.message_start in rest:
        return None
    # Without any opening it is the rest of a message that is in blocks already, if one can tell.
    return behind if begin is not None or spelling.message_start is not None else None


def _last(tokens: Sequence[int], wanted: Sequence[int]) -> int | None:
    """Where some tokens begin for the last time; None where they don't, or are none."""
    for begin in range(len(tokens) - len(wanted), -1, -1):
        if wanted and tuple(tokens[begin : begin + len(wanted)]) == tuple(wanted):
            return begin
    return None
