"""What SGLang's parsers say about an answer, as events, checked against the text they were given.

The parsers are written for models that keep to their format. Where a model does not, they drop
text: a call that never became one, words right before a call, the beginning of a marker at the
very end. What was fed and never came out is therefore remembered, and said as plain text.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from kvws.chat.answer import FinishReason, Reasoning, Text, ToolArguments, ToolCallBegun
from kvws.chat.format import AnswerPart, Ended


@dataclass(frozen=True)
class Markup:
    """How a model marks what is no plain text.

    Attributes:
        call: begins a tool call, or a list of them; "" if it is not known.
        thinking: begin and end reasoning.
        is_framed: every part of an answer is framed in markers, so that what did not come out
            may well have been one.
    """

    call: str = ""
    thinking: tuple[str, ...] = ()
    is_framed: bool = False


class AnswerEvents:
    """Builds the events of one answer. Methods return events; all mutate self.

    Attributes:
        markup: set when it is known.
    """

    def __init__(self) -> None:
        self.markup = Markup()
        self._pending = ""
        self._blanks: str = ""
        self._last: type | None = None
        self._calls = 0
        self._open_call: int | None = None
        self._call_chars = 0
        self._reasoning_tokens = 0
        self._untold_tokens = 0

    @property
    def may_begin_call(self) -> bool:
        """Whether a call's marker is among what was fed and did not come out yet."""
        return bool(self.markup.call) and self.markup.call.strip() in self._pending

    @property
    def unsettled_chars(self) -> int:
        """Text that the parsers go over again when they are given more."""
        return max(self._call_chars, len(self._pending))

    def fed(self, text: str, tokens: int) -> None:
        """Note what the parsers are about to be given."""
        self._pending += text
        self._untold_tokens += tokens
        if self._open_call is not None:
            self._call_chars += len(text)

    def reasoning(self, text: str) -> Iterator[AnswerPart]:
        self._reasoning_tokens += self._untold_tokens
        self._untold_tokens = 0
        self._explain(text)
        yield from self._say(Reasoning(text))

    def text(self, text: str) -> Iterator[AnswerPart]:
        yield from self._plain(self._dropped(self._explain(text)))
        yield from self._plain(text)

    def call(self, number: int, name: str | None, arguments: str) -> Iterator[AnswerPart]:
        """A call, or more of its arguments.

        Args:
            number: how the parser numbers it; several calls may have one number.
            name: of the tool, where the call begins.
        """
        if name:
            before, marker, _ = self._pending.partition(self.markup.call or "\0")
            if marker and self._last not in (ToolCallBegun, ToolArguments):
                yield from self._plain(self._without_thinking(before))
            self._blanks = ""
            self._open_call = number
            self._call_chars = 0
            begun = ToolCallBegun(self._calls, f"call_{uuid.uuid4().hex[:24]}", name)
            self._calls += 1
            yield from self._say(begun)
        elif number != self._open_call:
            return  # of a call that never began, or has ended
        self._explained()
        if arguments:
            yield from self._say(ToolArguments(self._calls - 1, arguments))

    def unparsed(self) -> Iterator[AnswerPart]:
        """What was fed to parsers that failed over it."""
        yield from self._plain(self._dropped(self._pending, all_of_it=True))
        self._explained()

    def end(self, finish_reason: str | None, stop_text: str | None) -> Iterator[AnswerPart]:
        """Args:
        finish_reason: the engine's own, of the last token.
        """
        yield from self._plain(self._dropped(self._pending))
        if self._last is None and self._blanks:
            yield from self._say(Text(self._blanks))
        reason: FinishReason = "stop"
        if stop_text is not None:
            reason = "stop_text"
        elif finish_reason == "length":
            reason = "length"
        elif self._calls:
            reason = "tool_calls"
        yield Ended(reason, stop_text, self._reasoning_tokens)

    def _plain(self, text: str) -> Iterator[AnswerPart]:
        """Text; blanks wait for something to say, as they mean nothing between other events."""
        if not text:
            return
        if self._last is not Text:
            text, self._blanks = self._blanks + text, ""
            if not text.strip():
                self._blanks = text
                return
        self._open_call = None
        self._call_chars = 0
        yield from self._say(Text(text))

    def _say(self, event: AnswerPart) -> Iterator[AnswerPart]:
        self._last = type(event)
        if not isinstance(event, Reasoning):
            self._blanks = ""
        yield event

    def _explain(self, text: str) -> str:
        """Take `text` off what was fed; returns what was passed over before it."""
        pending = self._pending
        begin = 0 if pending.startswith(text) else pending.rfind(text)
        if begin < 0:  # the parser took a marker out of the middle
            self._explained()
            return ""
        self._pending = pending[begin + len(text) :]
        self._untold_tokens = 0
        return pending[:begin]

    def _explained(self) -> None:
        self._pending = ""
        self._untold_tokens = 0

    def _dropped(self, passed_over: str, *, all_of_it: bool = False) -> str:
        """What of the text that did not come out was meant to be seen."""
        if self.markup.is_framed and not all_of_it:
            return ""
        text = self._without_thinking(passed_over)
        if self._last in (ToolCallBegun, ToolArguments):  # it begins with the end of a call
            begin = text.find(self.markup.call) if self.markup.call else -1
            return text[begin:] if begin >= 0 else ""
        return text

    def _without_thinking(self, text: str) -> str:
        for marker in self.markup.thinking:
            text = text.replace(marker, "")
        return text
