"""Answers as chat completions: a stream of chunks, or one body."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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
from kvws.chat.call import ModelCall
from kvws.chat.message import Message
from kvws.chat.whole_answer import assistant_message, finish_of
from kvws.errors import KvwsError
from kvws.http.chat_completions.errors import error_body
from kvws.http.dialect import SseEvent

_DONE = SseEvent("[DONE]")
_FINISH_REASONS: Mapping[FinishReason, str] = {
    "stop": "stop",
    "stop_text": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
}


class ChatCompletionWriter:
    """Writes one answer.

    ```
    role  (reasoning_content | content | tool_calls | {})*  finish_reason  usage?  [DONE]
                                                          | error  [DONE]
    ```

    The frames that keep a silent connection alive are chunks with an empty delta: comments would
    not reach every client's watchdog, and no client mistakes them for anything.
    """

    def __init__(self, call: ModelCall, *, answer_id: str, created_s: int) -> None:
        self._include_usage = call.include_usage
        self._head = {"id": answer_id, "created": created_s, "model": call.model}
        self._without_arguments: int | None = None

    def begin(self, usage: Usage) -> Iterable[SseEvent]:
        return [self._delta({"role": "assistant", "content": ""})]

    def event(self, event: AnswerEvent) -> Iterable[SseEvent]:
        if isinstance(event, ToolArguments):
            self._without_arguments = None
        else:
            yield from self._end_call()
        match event:
            case Reasoning(text):
                yield self._delta({"reasoning_content": text})
            case Text(text):
                yield self._delta({"content": text})
            case ToolCallBegun(index, call_id, name):
                self._without_arguments = index
                function = {"name": name, "arguments": ""}
                begun = {"id": call_id, "type": "function", "function": function}
                yield self._delta({"tool_calls": [{"index": index, **begun}]})
            case ToolArguments(index, json_text):
                yield self._arguments(index, json_text)
            case Finished():
                yield self._delta({}, finish_reason=_FINISH_REASONS[event.reason])
                if self._include_usage:
                    yield SseEvent(self._chunk([], _usage(event.usage)))
                yield _DONE

    def ping(self) -> Iterable[SseEvent]:
        return [self._delta({})]

    def stay_alive(self) -> Iterable[SseEvent]:
        return [self._delta({})]

    def error(self, error: KvwsError) -> Iterable[SseEvent]:
        return [SseEvent(error_body(error)), _DONE]

    def whole(self, events: Sequence[AnswerEvent]) -> Mapping[str, Any]:
        finish = finish_of(events)
        choice = {
            "index": 0,
            "message": _message(assistant_message(events)),
            "logprobs": None,
            "finish_reason": _FINISH_REASONS[finish.reason],
        }
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [choice],
            "usage": _usage(finish.usage),
        }

    def _end_call(self) -> Iterable[SseEvent]:
        """Arguments of a call that never got any: clients parse what they have put together."""
        if self._without_arguments is not None:
            yield self._arguments(self._without_arguments, "{}")
            self._without_arguments = None

    def _arguments(self, index: int, json_text: str) -> SseEvent:
        more = {"index": index, "function": {"arguments": json_text}}
        return self._delta({"tool_calls": [more]})

    def _delta(self, delta: Mapping[str, Any], *, finish_reason: str | None = None) -> SseEvent:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return SseEvent(self._chunk([choice], None))

    def _chunk(
        self, choices: Sequence[Mapping[str, Any]], usage: Mapping[str, Any] | None
    ) -> Mapping[str, Any]:
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        return {**chunk, "usage": usage} if self._include_usage else chunk


def _message(message: Message) -> dict[str, Any]:
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in message.tool_calls
    ]
    written: dict[str, Any] = {
        "role": "assistant",
        "content": message.content if message.content or not calls else None,
        "refusal": None,
    }
    if message.reasoning:
        written["reasoning_content"] = message.reasoning
    if calls:
        written["tool_calls"] = calls
    return written


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.answer_tokens,
        "total_tokens": usage.prompt_tokens + usage.answer_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.reused_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }
