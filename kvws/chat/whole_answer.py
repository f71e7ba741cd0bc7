"""An answer put together from its events."""

from __future__ import annotations

from collections.abc import Sequence

from kvws.chat.answer import (
    AnswerEvent,
    Finished,
    Reasoning,
    Text,
    ToolArguments,
    ToolCallBegun,
)
from kvws.chat.message import Message, ToolCall


def finish_of(events: Sequence[AnswerEvent]) -> Finished:
    """The last event of a complete answer."""
    last = events[-1]
    assert isinstance(last, Finished)
    return last


def assistant_message(events: Sequence[AnswerEvent]) -> Message:
    """The turn that an answer's events make up, complete or not."""
    arguments: dict[int, list[str]] = {}
    for event in events:
        if isinstance(event, ToolArguments):
            arguments.setdefault(event.index, []).append(event.json_text)
    return Message(
        "assistant",
        "".join(event.text for event in events if isinstance(event, Text)),
        tool_calls=tuple(
            ToolCall(event.id, event.name, "".join(arguments.get(event.index, ["{}"])))
            for event in events
            if isinstance(event, ToolCallBegun)
        ),
        reasoning="".join(event.text for event in events if isinstance(event, Reasoning)),
    )
