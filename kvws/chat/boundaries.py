"""Where one message ends and the next begins in a rendered list.

    plain     the rendering of the shorter list is how the longer one begins
    marked    put a mark into the last message before the boundary; what follows the mark in the
              shorter list closes that message's turn, and must follow it in the longer one

The second is for templates that write earlier messages otherwise once there are later ones. Where
neither holds there is no boundary: the answers of several tools in one turn, neighbours merged
into one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvws.chat.forms import Form
from kvws.chat.message import Message
from kvws.chat.render import ChatRenderer, Options
from kvws.chat.skeleton import stand_in
from kvws.errors import PromptError

_MARK = "k7v2w9s4"


@dataclass(frozen=True)
class Setting:
    """How lists are rendered while one list is looked at; each rendering is made once."""

    renderer: ChatRenderer
    form: Form
    tools: Sequence[Mapping[str, Any]]
    options: Options
    _texts: dict[tuple[Message, ...], str | None] = field(
        default_factory=dict[tuple[Message, ...], str | None], init=False, repr=False
    )

    def text(self, messages: Sequence[Message]) -> str | None:
        """The rendering of `messages`; None if it is refused."""
        key = tuple(messages)
        if key not in self._texts:
            self._texts[key] = self._rendered(messages, opening=False)
        return self._texts[key]

    def opened(self, messages: Sequence[Message]) -> str | None:
        """The rendering of `messages` and of what opens the next turn; None if it is refused."""
        return self._rendered(messages, opening=True)

    def _rendered(self, messages: Sequence[Message], *, opening: bool) -> str | None:
        try:
            return self.renderer.text_in(self.form, messages, self.tools, opening, self.options)
        except PromptError:
            return None


def boundary(
    setting: Setting, messages: Sequence[Message], position: int, text: str
) -> int | None:
    """Where messages[position] begins in `text`, the rendering of `messages`.

    `position` may be len(messages). None where there is no boundary.
    """
    if position in (0, len(messages)):
        return len(text) if position else 0
    end = _plain(setting, messages, position, text)
    return end if end is not None else _marked(setting, messages, position, text)


def end_of_known(
    setting: Setting, messages: Sequence[Message], position: int, text: str
) -> int | None:
    """As `boundary`, where messages[:position] are written already and cannot be taken back.

    A last turn of the assistant's may have been written otherwise when it was the last, but the
    rest must not, and neither may what it thought have gone.
    """
    if position in (0, len(messages)):
        return boundary(setting, messages, position, text)
    end = _plain(setting, messages, position, text)
    if end is None and _only_last_turn_differs(setting, messages, position, text):
        return _marked(setting, messages, position, text)
    return end


def closing(
    setting: Setting, before: Sequence[Message], last: Message, mark: str = _MARK
) -> str | None:
    """What follows the own text of `last` when it is the last message; None if it is not shown.

    Args:
        mark: a word that the other messages don't have.
    """
    text = setting.text([*before, _with_mark(last, mark)])
    return text.rpartition(mark)[2] if text is not None and mark in text else None


def _with_mark(message: Message, mark: str) -> Message:
    """A stand-in for `message` that ends in `mark`."""
    marked = stand_in(message, mark)
    if marked.tool_calls or mark in marked.content:
        return marked
    return replace(marked, content=mark)


def _plain(setting: Setting, messages: Sequence[Message], position: int, text: str) -> int | None:
    shorter = setting.text(messages[:position])
    return len(shorter) if shorter is not None and text.startswith(shorter) else None


def _marked(setting: Setting, messages: Sequence[Message], position: int, text: str) -> int | None:
    before, last, behind = messages[: position - 1], messages[position - 1], messages[position:]
    mark = _word_not_in(text)
    if (closed := closing(setting, before, last, mark)) is None:
        return None
    longer = setting.text([*before, _with_mark(last, mark), *behind])
    if longer is None or mark not in longer:
        return None
    rest = longer.rpartition(mark)[2]
    if not rest.startswith(closed):
        return None
    rest = rest[len(closed) :]
    return len(text) - len(rest) if text.endswith(rest) else None


def _word_not_in(text: str) -> str:
    """A word that a template leaves as it is."""
    word = _MARK
    while word in text:
        word += "k"
    return word


def _only_last_turn_differs(
    setting: Setting, messages: Sequence[Message], position: int, text: str
) -> bool:
    turn = messages[position - 1]
    if turn.role != "assistant" or turn.reasoning:
        return False
    return position == 1 or _plain(setting, messages, position - 1, text) is not None
