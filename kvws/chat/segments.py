"""A growing message list as token ids, message by message, at the cost of its new messages only.

    messages     0 ············· known ──── m ──── m+1 ──── n
    text         (told already)  │ segment  │ segment │ … │ opening │

The text of a message is where it stands in the rendering of the whole list. It is found by
rendering a few messages at a time among stand-ins (`skeleton`) for all the others, so the words
of a long history are not touched, and is cut at the boundaries that the template leaves
(`boundaries`). Every result is checked against the rendering of all new messages at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from kvws.chat.boundaries import Setting, boundary, closing, end_of_known
from kvws.chat.message import Message, ToolCall
from kvws.chat.render import NO_OPTIONS, ChatRenderer, Options
from kvws.chat.skeleton import STAND_IN, Skeleton
from kvws.errors import PromptError

Tools = Sequence[Mapping[str, Any]]

_AT_A_TIME = 8
_TOOL = "t4q8z3m1"
_STAND_IN_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": _TOOL,
        "description": STAND_IN,
        "parameters": {
            "type": "object",
            "properties": {STAND_IN: {"type": "string", "description": STAND_IN}},
            "required": [STAND_IN],
        },
    },
}


@dataclass(frozen=True)
class Segments:
    """Token ids of new messages, in order.

    Attributes:
        messages: of each message from the first new one on. The first message of all carries
            what precedes it (default system prompts, tool schemas). Messages that the template
            leaves no boundary between share one segment: it is the last one's, and the others
            have none.
        opening: what opens the assistant's turn behind them.
    """

    messages: tuple[tuple[int, ...], ...]
    opening: tuple[int, ...]


@dataclass(frozen=True)
class _Texts:
    """What `Segments` is the token ids of; `behind` is the text that stands before."""

    behind: str
    new: list[str]
    opening: str


class SegmentRenderer:
    """Segments of message lists, for one model. No list is remembered.

    Each list is rendered in the most faithful form that the template takes it in, whatever was
    rendered before; a list whose known part had another form has no segments.
    """

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer

    def segments(
        self,
        messages: Sequence[Message],
        tools: Tools,
        known: int,
        options: Options = NO_OPTIONS,
    ) -> Segments | None:
        """Token ids of messages[known:] and of what opens the next turn.

        Args:
            messages: the whole list, at least one.
            known: how many of them are tokens already; 0 to len(messages).

        Returns:
            None where the new messages change how the known ones are written, or where segments
            cannot be tokenised on their own: the whole list must be rendered (`whole`).

        Raises:
            PromptError: the template refuses the messages.
        """
        assert messages and 0 <= known <= len(messages)
        if not self._stand_ins_suffice:
            return None
        texts = self._texts(messages, tools, known, options)
        if texts is None:
            return None
        ids = self._renderer.pieces.parts([*texts.new, texts.opening], texts.behind)
        return None if ids is None else Segments(tuple(ids[:-1]), ids[-1])

    def whole(
        self, messages: Sequence[Message], tools: Tools, options: Options = NO_OPTIONS
    ) -> tuple[int, ...]:
        """Token ids of the whole list and of what opens the next turn.

        Raises:
            PromptError: the template refuses the messages.
        """
        _, text = self._renderer.first_text(messages, tools, True, options)
        return tuple(self._renderer.pieces(text))

    def closing(self) -> tuple[int, ...] | None:
        """Token ids that follow an assistant turn's own text; None if they depend on what comes
        behind."""
        talk = [Message(role, STAND_IN) for role in ("user", "assistant", "user")]
        try:
            number, text = self._renderer.first_text(talk, (), False, NO_OPTIONS)
        except PromptError:
            return None
        setting = Setting(self._renderer, self._renderer.forms[number], (), NO_OPTIONS)
        closed = closing(setting, talk[:1], talk[1])
        end = boundary(setting, talk, 2, text)
        if closed is None or end is None or not text[:end].endswith(closed):
            return None
        ids = self._renderer.pieces.parts([closed], STAND_IN)
        return None if ids is None else ids[0]

    def _texts(
        self, messages: Sequence[Message], tools: Tools, known: int, options: Options
    ) -> _Texts | None:
        skeleton = Skeleton(messages)
        shown, first = skeleton.around(known, len(messages))
        number = self._form_number(shown, first, _told(tools, known), options)
        if number is None:
            return None
        form = self._renderer.forms[number]
        setting = Setting(self._renderer, form, tools, options)
        brief = replace(setting, tools=_told(tools, 1))
        texts = _new_texts(brief if known else setting, shown, first)
        if texts is not None and known and _TOOL in texts.new[0] + texts.opening:
            texts = _new_texts(setting, shown, first)
        if texts is None:
            return None
        parts = _split(setting, brief, skeleton, known, len(messages))
        return replace(texts, new=parts) if "".join(parts) == texts.new[0] else None

    def _form_number(
        self, shown: Sequence[Message], known: int, tools: Tools, options: Options
    ) -> int | None:
        """The form in which the template takes `shown`; None if shown[:known] has another one.

        Raises:
            PromptError: it takes none, and nothing of `shown` is a stand-in.
        """
        try:
            number, _ = self._renderer.first_text(shown, tools, False, options)
            if number and known:
                before, _ = self._renderer.first_text(shown[:known], tools, False, options)
                return number if before == number else None
        except PromptError:
            if known:
                return None
            raise
        return number

    @cached_property
    def _stand_ins_suffice(self) -> bool:
        """Whether a long session of tool calls is written the same with stand-ins; a template
        that counts messages or words shows here."""
        session = _long_session()
        asked = self._stand_ins_agree(session, len(session) - 1)
        return asked and self._stand_ins_agree(session[:-2], len(session) - 4, must_grow=True)

    def _stand_ins_agree(
        self, messages: Sequence[Message], known: int, *, must_grow: bool = False
    ) -> bool:
        """Whether the text behind `known` is the same with stand-ins as with the messages.

        Args:
            must_grow: whether there has to be such a text: whether this must not change how the
                known messages are written.
        """
        try:
            number, text = self._renderer.first_text(messages, (), False, NO_OPTIONS)
        except PromptError:
            return True
        setting = Setting(self._renderer, self._renderer.forms[number], (), NO_OPTIONS)
        begin = end_of_known(setting, messages, known, text)
        texts = self._texts(messages, (), known, NO_OPTIONS)
        if begin is None or texts is None:
            return begin is None and texts is None and not must_grow
        return "".join(texts.new) == text[begin:]


def _told(tools: Tools, known: int) -> Tools:
    """Tools to render with: those before known messages are known, so any will do."""
    return (_STAND_IN_TOOL,) if tools and known else tools


def _new_texts(setting: Setting, shown: Sequence[Message], known: int) -> _Texts | None:
    """The text of shown[known:], in one."""
    text, opened = setting.text(shown), setting.opened(shown)
    if text is None or opened is None or not opened.startswith(text):
        return None
    if (begin := end_of_known(setting, shown, known, text)) is None:
        return None
    return _Texts(text[:begin], [text[begin:]], opened[len(text) :])


def _split(
    setting: Setting, brief: Setting, skeleton: Skeleton, known: int, count: int
) -> list[str]:
    """The text of each message from `known` to `count`; messages without a boundary between them
    have theirs on the last one. `brief` is `setting` with little tools."""
    parts: list[str] = []
    width = _AT_A_TIME
    while (lo := known + len(parts)) < count:
        hi = min(lo + width, count)
        shown, first = skeleton.around(lo, hi)
        found = _cut(brief if lo else setting, shown, first, hi - lo)
        if lo and any(_TOOL in part for part in found):  # the tools are shown here
            found = _cut(setting, shown, first, hi - lo)
        if not found and hi == count:
            break
        parts += found
        width = _AT_A_TIME if found else 2 * width
    return parts


def _cut(setting: Setting, shown: Sequence[Message], first: int, count: int) -> list[str]:
    """The texts of shown[first:first + count], up to the last boundary among them."""
    text = setting.text(shown)
    begin = None if text is None else boundary(setting, shown, first, text)
    if text is None or begin is None:
        return []
    parts: list[str] = []
    waiting = 0
    for position in range(first + 1, first + count + 1):
        end = boundary(setting, shown, position, text)
        if end is None or end < begin:
            waiting += 1
            continue
        parts += [""] * waiting + [text[begin:end]]
        begin, waiting = end, 0
    return parts


def _long_session() -> list[Message]:
    """Two tasks, worked on by calling tools, and a third one."""
    session = [Message("system", "Be brief."), Message("user", "List the files.")]
    for turn in range(40):
        call = ToolCall(f"call{turn:05d}", "run", f'{{"command": "ls {turn}"}}')
        session += [
            Message("assistant", f"Step {turn}.", (call,)),
            Message("tool", f"{turn} files\n", name="run", tool_call_id=call.id),
        ]
        if turn == 20:
            session += [Message("assistant", "There are some."), Message("user", "And then?")]
    return [*session, Message("assistant", "Nothing more."), Message("user", "Thank you.")]
