"""A call's messages as tokens: only what is not known yet is rendered.

What it costs grows with the new messages, but for two passes over the old ones: their digests,
and a search for facts that change by themselves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from kvws.chat.call import ModelCall
from kvws.chat.canonical import message_digest, tools_digest
from kvws.chat.landmarks import is_task, policy_paths
from kvws.chat.message import Message
from kvws.chat.render import ChatRenderer
from kvws.chat.segments import SegmentRenderer
from kvws.chat.volatile import facts, reminder
from kvws.recall.spans import Span
from kvws.session.transcript import Known, Landmarks, Named, Place

_REMINDER_END = "</system-reminder>"
_OPENING_MAX_TOKENS = 16
"""The end of a prompt that may open the assistant's turn."""


@dataclass(frozen=True)
class NewTokens:
    """What a prompt adds to a known place.

    Attributes:
        place: the known place; the beginning of everything when the whole prompt was rendered.
        tokens: of the new messages, without the tail of the place.
        opening: tokens that open the assistant's turn behind them.
        opening_text: the same as text.
        landmarks: of the whole list of messages.
        told: facts that the whole list tells.
        tools: the tools that are told of, by name: digests.
        is_piecewise: whether the template renders each message on its own, so that the end of
            this list is a place that later prompts can begin at.
    """

    place: Place
    tokens: tuple[int, ...]
    opening: tuple[int, ...]
    opening_text: str
    landmarks: Landmarks
    told: Mapping[str, str]
    tools: Mapping[str, bytes]
    is_piecewise: bool


class PromptBuilder:
    """Renders and tokenises prompts of one model. Not safe to use from two threads at once."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._segments = SegmentRenderer(renderer)

    def digests(
        self, thread: str, messages: Sequence[Message], latest: Named | None = None
    ) -> list[bytes]:
        """Names of the lists messages[:0], messages[:1], … of a thread.

        Args:
            latest: another list of that thread. What both begin with is compared, which is
                cheaper than to digest it.
        """
        if latest is None:
            chain = [blake2b(thread.encode(), digest_size=16).digest()]
        else:
            chain = list(latest.digests[: _alike(messages, latest.messages) + 1])
        for message in messages[len(chain) - 1 :]:
            chain.append(message_digest(chain[-1], message))
        return chain

    def count(self, call: ModelCall, options: Mapping[str, Any]) -> int:
        """Tokens of a call's prompt."""
        return len(self._whole(call, options))

    def _whole(self, call: ModelCall, options: Mapping[str, Any]) -> tuple[int, ...]:
        """A call's prompt, all of it tokenised anew: if pieces were remembered, the time that this
        takes would tell one API key what another has sent."""
        _, text = self._renderer.first_text(call.messages, call.tools, True, options)
        parts = self._renderer.pieces.parts([text], behind="")
        assert parts is not None, "a text as a whole can always be tokenised"
        return parts[0]

    def closing(self) -> tuple[int, ...] | None:
        """Tokens that end an assistant's turn; None when the template shows none."""
        return self._segments.closing()

    def new_tokens(
        self, call: ModelCall, options: Mapping[str, Any], known: Known
    ) -> NewTokens:
        """Render what is new in a call's prompt.

        Known messages keep their tokens, also where what they say is no longer so: a date, or
        the tools on offer. What is new about that is told at the end.

        Raises:
            PromptError: the template refuses the messages.
        """
        place, told = known.place, _facts(call.messages)
        tools = {_tool_name(tool): tools_digest((tool,)) for tool in call.tools}
        messages = call.messages
        if known.messages:
            news = _news(place, told, tools, call.tools)
            messages = (*messages, *(Message("system", text) for text in news))
        segments = self._segments.segments(messages, call.tools, known.messages, options)
        if segments is None:
            whole = self._whole(call, options)
            opening = self._renderer.decode(whole[-_OPENING_MAX_TOKENS:])
            return NewTokens(Place(), whole, (), opening, Landmarks(), told, tools, False)
        tokens: list[int] = []
        landmarks = place.landmarks
        for index, ids in enumerate(segments.messages, start=known.messages):
            begin = place.tokens + len(tokens)
            tokens += ids
            if index < len(call.messages):
                span = Span(begin, begin + len(ids))
                landmarks = _with_message(landmarks, call.messages[index], span)
        opening = self._renderer.decode(segments.opening)
        return NewTokens(
            place, tuple(tokens), segments.opening, opening, landmarks, told, tools, True
        )


def _news(
    place: Place,
    told: Mapping[str, str],
    tools: Mapping[str, bytes],
    schemas: Sequence[Mapping[str, Any]],
) -> list[str]:
    """What the tokens before a place say that is no longer so, and what is so now."""
    news: list[str] = []
    changed = {
        fact.partition(":")[2]: value
        for fact, value in told.items()
        if place.told.get(fact, value) != value
    }
    if changed:
        news.append(reminder(changed))
    new = [s for s in schemas if place.tools.get(name := _tool_name(s)) != tools[name]]
    if new:
        lines = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in new)
        news.append(f"From now on these tools can be called, too:\n<tools>\n{lines}\n</tools>")
    gone = [name for name in place.tools if name not in tools]
    if gone:
        news.append(f"These tools can no longer be called: {', '.join(gone)}.")
    return news


def _tool_name(tool: Mapping[str, Any]) -> str:
    return str(tool["function"]["name"])


def _alike(messages: Sequence[Message], others: Sequence[Message]) -> int:
    """How many messages two lists begin with in common; what was read once is one object."""
    pairs = enumerate(zip(messages, others, strict=False))
    unlike = (index for index, (one, other) in pairs if one is not other and one != other)
    return next(unlike, min(len(messages), len(others)))


def _facts(messages: Sequence[Message]) -> dict[str, str]:
    """Facts that change by themselves, by "index:kind" of the message that tells them."""
    return {
        f"{index}:{kind}": value
        for index, message in enumerate(messages)
        if message.role in ("system", "user")
        for kind, value in facts(message.content).items()
    }


def _with_message(landmarks: Landmarks, message: Message, span: Span) -> Landmarks:
    """Landmarks of a list with one more message."""
    if message.role == "system" and span.begin == landmarks.system_end:
        return replace(landmarks, system_end=span.end)
    if paths := policy_paths(message):
        policies = {**(landmarks.policies or {}), **dict.fromkeys(paths, span)}
        landmarks = replace(landmarks, policies=policies)
    if is_task(message):
        landmarks = replace(landmarks, task=_own_text(message.content, span))
    return landmarks


def _own_text(content: str, span: Span) -> Span:
    """About where in a user's message the user's own text is: behind the client's reminders."""
    begin = content.rfind(_REMINDER_END)
    begin = begin + len(_REMINDER_END) if begin >= 0 else 0
    if not content[begin:].strip():
        return span
    tokens = -(-(span.end - span.begin) * (len(content) - begin) // len(content))
    return Span(span.end - tokens, span.end)
