"""Which tokens of a question are its own, and not the chat template's. A pure decision."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvws.recall.text.spelling import Spelling, is_marker

_LONGEST_ROLE_TOKENS = 8


def own_words(question: Sequence[int], spelling: Spelling) -> npt.NDArray[np.uint8]:
    """One number per token: 1 where it is of what somebody said.

    Markers, the role that is named behind one, and blanks behind either are alike in all
    messages: what they attend to has nothing to do with what is asked. Neither has the end of the
    message before, which stands in front of a question because it was not a whole block.
    """
    own = np.ones(len(question), dtype=np.uint8)
    first_message = last_opening = None
    place = 0
    while place < len(question):
        header = _header(question, place, spelling)
        if header == place:
            place += 1
            continue
        if tuple(question[place:header]) == spelling.opening:
            last_opening = place
        if first_message is None and _begins_message(question[place:header], spelling):
            first_message = place
        behind = _first_word(question, header, spelling)
        own[place:behind] = 0
        place = behind
    # Behind the last opening there is no message yet, but at most the beginning of the answer.
    if first_message not in (None, last_opening) and own[first_message:].any():
        own[:first_message] = 0
    return own


def _begins_message(header: Sequence[int], spelling: Spelling) -> bool:
    return header[0] == spelling.message_start or tuple(header) == spelling.opening


def _header(question: Sequence[int], place: int, spelling: Spelling) -> int:
    """Where what begins at a place as a message's header or as another marker ends."""
    opening, token = spelling.opening, question[place]
    if opening and tuple(question[place : place + len(opening)]) == tuple(opening):
        return place + len(opening)
    if token == spelling.message_start:
        return _behind_role(question, place + 1, spelling)
    return place + 1 if is_marker(spelling.decode([token])) else place


def _behind_role(question: Sequence[int], place: int, spelling: Spelling) -> int:
    """Where the role that is named at a place ends: behind the assistant's marker, or before a
    blank. Without either it is taken to be as long as the assistant's."""
    for end in range(place, min(len(question), place + _LONGEST_ROLE_TOKENS)):
        text = spelling.decode([question[end]])
        if question[end] in spelling.opening[1:] and is_marker(text):
            return end + 1
        if text[:1].isspace():
            return end
    return min(len(question), place + len(spelling.opening) - 1)


def _first_word(question: Sequence[int], place: int, spelling: Spelling) -> int:
    """The place of the first token from one on that is no blank."""
    while place < len(question) and not spelling.decode([question[place]]).strip():
        place += 1
    return place
