"""Talks, and what a renderer makes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvws.chat.message import Message, ToolCall
from kvws.chat.segments import SegmentRenderer, Segments

SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "Read",
        "description": "Reads a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}


def put_together(segments: Segments) -> tuple[int, ...]:
    return tuple(id_ for ids in (*segments.messages, segments.opening) for id_ in ids)


def user(text: str) -> Message:
    return Message("user", text)


def said(text: str, *calls: ToolCall, reasoning: str = "") -> Message:
    return Message("assistant", text, calls, reasoning=reasoning)


def read(number: int) -> ToolCall:
    return ToolCall(f"c{number:08d}", "Read", f'{{"path": "file {number}"}}')


def answer(number: int, text: str) -> Message:
    return Message("tool", text, name="Read", tool_call_id=f"c{number:08d}")


TALK = (
    Message("system", "Be brief."),
    user("Look."),
    said("Reading.", read(1)),
    answer(1, "x = 1\n"),
    said("", read(2)),
    answer(2, "x = 2\n"),
    said("It sets x."),
    user("Thanks."),
)


def told_stepwise(
    renderer: SegmentRenderer, steps: list[list[Message]], tools: list[dict[str, Any]]
) -> tuple[tuple[int, ...] | None, list[Message]]:
    """The segments of all steps put together, or None where one has none; and the messages."""
    messages: list[Message] = []
    ids: tuple[int, ...] = ()
    opening: tuple[int, ...] = ()
    for step in steps:
        known = len(messages)
        messages = [*messages, *step]
        segments = renderer.segments(messages, tools, known)
        if segments is None:
            return None, messages
        assert len(segments.messages) == len(step)
        if 0 < known < 30:
            assert as_generated(renderer, messages, tools, known, segments) in (None, segments)
        ids += put_together(replace(segments, opening=()))
        opening = segments.opening
    return ids + opening, messages


def as_generated(
    renderer: SegmentRenderer,
    messages: list[Message],
    tools: list[dict[str, Any]],
    known: int,
    segments: Segments,
) -> Segments | None:
    """What is told where the step's first message, the assistant's, is known as it was made; with
    that message's own segment put back."""
    rest = renderer.segments(messages, tools, known + 1)
    if rest is None or not segments.messages[0]:
        return None
    return replace(rest, messages=(segments.messages[0], *rest.messages))
