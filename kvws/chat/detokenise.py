"""Generated tokens as text, while they come.

A token need not be text on its own: a character may be spread over several of them, and how a
token reads may depend on the one before it. So text is what a few tokens more decode to than a
few tokens less, and it is given out as soon as later tokens cannot change it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_HELD_TOKENS = 64
"""Tokens without one certain character after which they are garbage, and given out as such."""


class Detokeniser:
    """Text of tokens that come one by one. All of it together is what they decode to at once."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        """`decode` maps token ids to text, a broken character to U+FFFD."""
        self._decode = decode
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []
        self._given_chars = 0

    def add(self, token: int) -> str:
        """The text that is certain since the last call. Mutates self."""
        self._pending.append(token)
        text = self._pending_text()
        certain = text.rstrip(_REPLACEMENT)
        if len(certain) < len(text) and len(self._pending) >= _MAX_HELD_TOKENS:
            certain = text
        new = certain[self._given_chars :]
        self._given_chars = max(self._given_chars, len(certain))
        if text and len(certain) == len(text):
            # Tokens without text stay: a context that reads as nothing would be none.
            self._context, self._pending = self._pending, []
            self._context_text = self._decode(self._context)
            self._given_chars = 0
        return new

    def finish(self) -> str:
        """The text that no further token can change any more. Mutates self."""
        rest = self._pending_text()[self._given_chars :]
        self._context, self._context_text, self._pending = [], "", []
        self._given_chars = 0
        return rest

    def _pending_text(self) -> str:
        if not self._pending:
            return ""
        return self._decode(self._context + self._pending)[len(self._context_text) :]


class StopTexts:
    """Lets text through up to the first of the texts that end it.

    The end of what came is held back as long as it may be the beginning of a stop text. Of
    several matches the one that is complete first counts, of those the longest.

    Attributes:
        matched: the stop text that was found; nothing comes out any more.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(text for text in texts if text)
        self._held = ""
        self.matched: str | None = None

    def add(self, text: str) -> str:
        """What may be shown now. Mutates self."""
        if self.matched is not None:
            return ""
        self._held += text
        ends = {
            found + len(stop): (found, stop)
            for stop in sorted(self._texts, key=len)
            if (found := self._held.find(stop)) >= 0
        }
        if ends:
            found, self.matched = ends[min(ends)]
            shown, self._held = self._held[:found], ""
            return shown
        kept_chars = max((_overlap(self._held, stop) for stop in self._texts), default=0)
        split = len(self._held) - kept_chars
        shown, self._held = self._held[:split], self._held[split:]
        return shown

    def finish(self) -> str:
        """What was held back and cannot become a stop text any more. Mutates self."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, short of all of it."""
    for chars in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:chars]):
            return chars
    return 0
