"""A long message list with most of it replaced by little stand-ins of the same structure.

    0 ─────────────── lo ─────────── hi ─────────────── n
    stand-ins, thinned   as they are    stand-ins, thinned

What a template writes for some messages may depend on the others: on their roles, on whether they
call tools or hold reasoning, on the last user message, on whether counts are even. It does not
depend on their words. So stand-ins keep the former, and where the same kinds of messages come
again and again, whole repetitions are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from kvws.chat.message import Message, Role, ToolCall

STAND_IN = "x"
_NEAR = 4
_SEARCHED = 24
_ANSWER = ("<tool_response>", "</tool_response>")


_Kind = tuple[Role, Role | None, int, bool, bool, str]
"""What a template can tell about a message without reading it: who speaks, who spoke before, how
many calls it has (two stand for more), whether it has text and reasoning, how it is wrapped."""


class Skeleton:
    """Stand-ins for the messages of one list."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = messages

    def around(self, lo: int, hi: int) -> tuple[list[Message], int]:
        """messages[lo:hi] among stand-ins for all the others, and where the first of them is."""
        before = [self._stand_in(n) for n in self._kept(0, lo)]
        behind = [self._stand_in(n) for n in self._kept(hi, len(self._messages))]
        return [*before, *self._messages[lo:hi], *behind], len(before)

    def _stand_in(self, position: int) -> Message:
        message = self._messages[position]
        if position == 0 and message.role == "system":
            return message  # some templates look for switches in it
        return stand_in(message, f"{STAND_IN}{position}")  # some look for equal messages

    def _kept(self, lo: int, hi: int) -> list[int]:
        """Positions in [lo, hi) that are needed, ascending."""
        if hi - lo <= 3 * _NEAR:
            return list(range(lo, hi))
        needed = {*range(lo, lo + _NEAR), *range(hi - _NEAR, hi)}
        witnesses = [n for n in self._first_of_kind if lo <= n < hi]
        if (last_user := self._last_user(lo, hi)) is not None:
            witnesses += [last_user, min(last_user + 1, hi - 1)]
        for witness in witnesses:
            needed |= {max(witness - 1, lo), witness}
        kept: list[int] = []
        for position in sorted(needed):
            if kept:
                kept += self._thinned(kept[-1] + 1, position)
            kept.append(position)
        return kept

    def _thinned(self, lo: int, hi: int) -> list[int]:
        """Positions in [lo, hi), without as many whole repetitions as can be found.

        What is left out, [a, b), begins like what follows it and is of even length, so that
        every neighbour, turn and parity is one that the list had; and it does not begin between
        a call and its answers.
        """
        firsts: dict[tuple[_Kind, bool], int] = {}
        for a in range(lo, min(lo + _SEARCHED, hi)):
            if self._messages[a].role != "tool":
                firsts.setdefault((self._kinds[a], a % 2 == 0), a)
        for b in range(hi, max(hi - _SEARCHED, lo), -1):
            a = firsts.get((self._kinds[b], b % 2 == 0), b)
            if a < b:
                return [*range(lo, a), *range(b, hi)]
        return list(range(lo, hi))

    @cached_property
    def _kinds(self) -> list[_Kind]:
        kinds: list[_Kind] = []
        before: Role | None = None
        for message in self._messages:
            role, calls = message.role, min(len(message.tool_calls), 2)
            shown = _has_words(message), bool(message.reasoning), _wrapping(message)[0]
            kinds.append((role, before, calls, *shown))
            before = role
        return kinds

    @cached_property
    def _first_of_kind(self) -> list[int]:
        firsts: dict[_Kind, int] = {}
        for position, kind in enumerate(self._kinds):
            firsts.setdefault(kind, position)
        return list(firsts.values())

    def _last_user(self, lo: int, hi: int) -> int | None:
        for position in range(hi - 1, lo - 1, -1):
            role, *_, wrapping = self._kinds[position]
            if role == "user" and not wrapping:
                return position
        return None


def stand_in(message: Message, text: str) -> Message:
    """A little message that a template treats like `message`; `text` is in it, and is the last
    of what it says."""
    calls = [ToolCall(c.id, c.name, f'{{"{STAND_IN}": "{STAND_IN}"}}') for c in message.tool_calls]
    if calls:
        calls[-1] = replace(calls[-1], arguments=f'{{"{STAND_IN}": "{text}"}}')
    opening, closing = _wrapping(message)
    word = STAND_IN if calls else text
    return replace(
        message,
        content=f"{opening}{word}{closing}" if _has_words(message) else message.content[:1],
        tool_calls=tuple(calls),
        reasoning=STAND_IN if message.reasoning else "",
    )


def _has_words(message: Message) -> bool:
    return bool(message.content) and not message.content.isspace()


def _wrapping(message: Message) -> tuple[str, str]:
    """Tags in the text that templates are known to look for."""
    text = message.content
    if message.role == "assistant" and "</think>" in text:
        return f"<think>{STAND_IN}</think>", ""
    if message.role == "user" and text.startswith(_ANSWER[0]) and text.endswith(_ANSWER[1]):
        return _ANSWER
    return "", ""
