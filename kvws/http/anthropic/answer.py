"""An answer as server-sent events of the Messages API, or as one body.

    message_start
    (content_block_start  content_block_delta*  content_block_stop)*     indexes from 0, no gap
    message_delta  message_stop

A block stays open until something of another kind comes, so between message_start and the end
there is a block open, except before the first one. An answer that fails ends in an error event
instead, and leaves its block open: clients act on a block once it is closed, and half a tool call
must not be carried out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast
from uuid import uuid4

from kvws.chat.answer import (
    AnswerEvent,
    Finished,
    FinishReason,
    Reasoning,
    Text,
    ToolArguments,
    ToolCallBegun,
    Usage,
)
from kvws.errors import KvwsError
from kvws.http.anthropic.errors import error_body
from kvws.http.anthropic.markers import NOTHING_SAID, SIGNATURE, UNPARSED_INPUT
from kvws.http.dialect import SseEvent
from kvws.http.json_body import mended

BlockKind = Literal["thinking", "text", "tool_use"]

_DELTA: Mapping[BlockKind, tuple[str, str]] = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""Of each kind of block: the type of its deltas, and the member that holds their text."""

_STOP_REASON: Mapping[FinishReason, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "stop_text": "stop_sequence",
}


class AnthropicWriter:
    """Writes one answer."""

    def __init__(self, model: str) -> None:
        """`model`: as the client called it."""
        self._model = model
        self._open: BlockKind | None = None
        self._blocks = 0
        self._held_blanks = ""
        self._shows_something = False

    def begin(self, usage: Usage) -> list[SseEvent]:
        return [_event("message_start", message=self._message(usage))]

    def event(self, event: AnswerEvent) -> list[SseEvent]:
        match event:
            case Text(text):
                return self._text(text)
            case Reasoning(text):
                self._held_blanks = ""
                return [*self._within_thinking(), self._delta(text)]
            case ToolCallBegun(_, call_id, name):
                self._held_blanks = ""
                return self._start("tool_use", {"id": call_id, "name": name, "input": {}})
            case ToolArguments(_, json_text):
                return [self._delta(json_text)]
            case Finished():
                return self._finish(event)

    def ping(self) -> list[SseEvent]:
        return [_event("ping")]

    def stay_alive(self) -> list[SseEvent]:
        """An empty delta of whatever block is open. Before the first block that is a thinking
        block, which stays empty if the model then does not think; `read` drops empty ones."""
        return [*([] if self._open else self._within_thinking()), self._delta("")]

    def error(self, error: KvwsError) -> list[SseEvent]:
        return [SseEvent(error_body(error), event="error")]

    def whole(self, events: Sequence[AnswerEvent]) -> Mapping[str, Any]:
        frames = [frame for event in events for frame in self.event(event)]
        finished = events[-1]
        assert isinstance(finished, Finished)
        return {
            **self._message(finished.usage),
            "content": _content(cast("Mapping[str, Any]", frame.data) for frame in frames),
            **_stop(finished),
        }

    def _message(self, usage: Usage) -> dict[str, Any]:
        return {
            "id": f"msg_{uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }

    def _text(self, text: str) -> list[SseEvent]:
        """Blanks at the start of a text wait for something visible, and are lost if none comes:
        models put line breaks between their thoughts and a tool call."""
        if self._open == "text":
            return [self._delta(text)]
        text = self._held_blanks + text
        self._held_blanks = "" if text.strip() else text
        return [*self._start("text", {"text": ""}), self._delta(text)] if text.strip() else []

    def _within_thinking(self) -> list[SseEvent]:
        if self._open == "thinking":
            return []
        return self._start("thinking", {"thinking": "", "signature": ""})

    def _start(self, kind: BlockKind, members: Mapping[str, Any]) -> list[SseEvent]:
        closed = self._close()
        self._open = kind
        self._blocks += 1
        self._shows_something |= kind != "thinking"
        block = {"type": kind, **members}
        return [*closed, self._block_event("content_block_start", content_block=block)]

    def _delta(self, text: str) -> SseEvent:
        assert self._open is not None, "a delta belongs to an open block"
        kind, member = _DELTA[self._open]
        return self._block_event("content_block_delta", delta={"type": kind, member: text})

    def _close(self) -> list[SseEvent]:
        if self._open is None:
            return []
        frames = [self._block_event("content_block_stop")]
        if self._open == "thinking":
            signed = {"type": "signature_delta", "signature": SIGNATURE}
            frames.insert(0, self._block_event("content_block_delta", delta=signed))
        self._open = None
        return frames

    def _finish(self, finished: Finished) -> list[SseEvent]:
        self._held_blanks = ""
        return [
            *([] if self._shows_something else self._text(NOTHING_SAID)),
            *self._close(),
            _event("message_delta", delta=_stop(finished), usage=_usage(finished.usage)),
            _event("message_stop"),
        ]

    def _block_event(self, kind: str, **members: Any) -> SseEvent:
        return _event(kind, index=self._blocks - 1, **members)


def _event(kind: str, **members: Any) -> SseEvent:
    return SseEvent({"type": kind, **members}, event=kind)


def _stop(finished: Finished) -> dict[str, Any]:
    return {
        "stop_reason": _STOP_REASON[finished.reason],
        "stop_sequence": finished.stop_text if finished.reason == "stop_text" else None,
    }


def _usage(usage: Usage) -> dict[str, int]:
    """The three prompt counts add up to the client's whole prompt, by which it measures how full
    its window is."""
    return {
        "input_tokens": usage.prompt_tokens - usage.reused_tokens - usage.stored_tokens,
        "cache_creation_input_tokens": usage.stored_tokens,
        "cache_read_input_tokens": usage.reused_tokens,
        "output_tokens": usage.answer_tokens,
    }


def _content(frames: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that a stream's frames spell out."""
    blocks: list[dict[str, Any]] = []
    fragments: list[list[str]] = []
    for frame in frames:
        match frame:
            case {"type": "content_block_start", "content_block": block}:
                blocks.append(dict(block))
                fragments.append([])
            case {"delta": {"signature": signature}}:
                blocks[-1]["signature"] = signature
            case {"type": "content_block_delta", "delta": delta}:
                _, member = _DELTA[blocks[-1]["type"]]
                fragments[-1].append(delta[member])
            case _:
                pass
    for block, texts in zip(blocks, fragments, strict=True):
        if block["type"] == "tool_use":
            block["input"] = _tool_input("".join(texts))
        else:
            block[block["type"]] = "".join(texts)
    return blocks


def _tool_input(arguments: str) -> dict[str, Any]:
    """Arguments as the object that a body must hold; what is no object goes in the form that
    clients themselves give to arguments of a stream that they cannot parse."""
    if not arguments:
        return {}
    try:
        value: Any = json.loads(arguments)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return mended(value)
    return {UNPARSED_INPUT: {"raw": arguments, "len": len(arguments)}}
