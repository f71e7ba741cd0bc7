"""An answer as a stream of response events, or as one response object.

    response.created  response.in_progress
        (response.output_item.added  …deltas…  response.output_item.done)*
    response.completed | response.incomplete | response.failed

What Codex makes of it decides what is written:
- It acts on an item once its output_item.done came. So a tool call that was cut off never gets
  one, lest half a command be run; the last event shows that call as incomplete.
- Every event resets its clock for silent streams, comments do not. response.in_progress means
  nothing to it at any time, so that is what a ping is.
- response.incomplete ends its turn. After response.failed it asks again, unless the code says
  that this is useless (see `failure_code`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvws.chat.answer import (
    AnswerEvent,
    Finished,
    Reasoning,
    Text,
    ToolArguments,
    ToolCallBegun,
    Usage,
)
from kvws.chat.call import ModelCall
from kvws.errors import BadRequest, KvwsError, PromptError, PromptTooLong
from kvws.http.dialect import SseEvent
from kvws.http.responses.output import (
    CallItem,
    CustomCallItem,
    FunctionCallItem,
    MessageItem,
    OutputItem,
    Payload,
    ReasoningItem,
)
from kvws.http.responses.tools import ToolOrigin


class ResponsesWriter:
    """Writes one answer; see AnswerWriter."""

    def __init__(
        self,
        call: ModelCall,
        origins: Mapping[str, ToolOrigin],
        unique: str,
        created_at_s: int,
    ) -> None:
        """
        Args:
            origins: of the tools that the model knows by another name or in another shape.
            unique: letters and digits that no other answer has; part of every id.
            created_at_s: Unix time.
        """
        self._call = call
        self._origins = origins
        self._unique = unique
        self._created_at_s = created_at_s
        self._sequence_number = 0
        self._closed: list[Payload] = []
        self._open: OutputItem | None = None

    def begin(self, usage: Usage) -> Iterable[SseEvent]:
        return self._numbered(
            {"type": "response.created", "response": self._response("in_progress")},
            {"type": "response.in_progress", "response": self._response("in_progress")},
        )

    def event(self, event: AnswerEvent) -> Iterable[SseEvent]:
        match event:
            case Reasoning(text):
                return self._numbered(*self._add_to(ReasoningItem, text))
            case Text(text):
                return self._numbered(*self._add_to(MessageItem, text))
            case ToolCallBegun():
                return self._numbered(*self._close(), *self._begin_call(event))
            case ToolArguments(_, json_text):
                assert isinstance(self._open, CallItem), "arguments follow the call they are of"
                return self._numbered(*self._open.add(json_text))
            case Finished():
                return self._numbered(*self._finish(event))

    def ping(self) -> Iterable[SseEvent]:
        return self._numbered(
            {"type": "response.in_progress", "response": self._response("in_progress")}
        )

    def stay_alive(self) -> Iterable[SseEvent]:
        return self.ping()

    def error(self, error: KvwsError) -> Iterable[SseEvent]:
        """As AnswerWriter.error; also right where `begin` was never written, for a client that
        heeds the codes of errors in streams only."""
        response = self._response("failed")
        response["error"] = {"code": failure_code(error), "message": failure_message(error)}
        failed = {"type": "response.failed", "response": response}
        if self._sequence_number:
            return self._numbered(failed)
        created = {"type": "response.created", "response": self._response("in_progress")}
        return self._numbered(created, failed)

    def whole(self, events: Sequence[AnswerEvent]) -> Payload:
        *before, finished = events
        assert isinstance(finished, Finished), "an answer ends with Finished"
        for event in before:
            self.event(event)
        return self._finish(finished)[-1]["response"]

    def _numbered(self, *payloads: Payload) -> list[SseEvent]:
        events: list[SseEvent] = []
        for payload in payloads:
            data = {**payload, "sequence_number": self._sequence_number}
            events.append(SseEvent(data, event=payload["type"]))
            self._sequence_number += 1
        return events

    def _add_to(self, kind: type[ReasoningItem | MessageItem], text: str) -> list[Payload]:
        if isinstance(self._open, kind):
            return self._open.add(text)
        closing = self._close()
        item = kind(self._item_id(kind), len(self._closed))
        self._open = item
        return [*closing, *item.opening(), *item.add(text)]

    def _begin_call(self, event: ToolCallBegun) -> list[Payload]:
        origin = self._origins.get(event.name) or ToolOrigin(event.name)
        kind = CustomCallItem if origin.custom else FunctionCallItem
        item = kind(self._item_id(kind), len(self._closed), event.id, origin)
        self._open = item
        return item.opening()

    def _close(self) -> list[Payload]:
        """End the open item, complete. Mutates self."""
        if self._open is None:
            return []
        item, self._open = self._open, None
        self._closed.append(item.shown("completed"))
        return item.closing("completed")

    def _finish(self, finished: Finished) -> list[Payload]:
        too_long = finished.reason == "length"
        events = self._cut_off() if too_long else self._close()
        status = "incomplete" if too_long else "completed"
        response = self._response(status)
        response["usage"] = _usage(finished.usage)
        if too_long:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return [*events, {"type": f"response.{status}", "response": response}]

    def _cut_off(self) -> list[Payload]:
        """End the open item where the answer became too long. Mutates self."""
        item = self._open
        if item is None or (isinstance(item, CallItem) and not item.is_cut):
            return self._close()
        self._open = None
        self._closed.append(item.shown("incomplete"))
        return [] if isinstance(item, CallItem) else item.closing("incomplete")

    def _item_id(self, kind: type[OutputItem]) -> str:
        return f"{kind.prefix}_{self._unique}{len(self._closed)}"

    def _response(self, status: str) -> Payload:
        """The response object. It leaves out what the client sent itself, tools above all: they
        would be sent back to it with each ping."""
        call = self._call
        choice = call.tool_choice
        return {
            "id": f"resp_{self._unique}",
            "object": "response",
            "created_at": self._created_at_s,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "max_output_tokens": call.max_tokens,
            "metadata": {},
            "model": call.model,
            "output": list(self._closed) if status != "in_progress" else [],
            "parallel_tool_calls": call.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": call.sampling.temperature,
            "tool_choice": self._choice(choice.name) if choice.name else choice.mode,
            "tools": [],
            "top_p": call.sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def _choice(self, name: str) -> Payload:
        origin = self._origins.get(name) or ToolOrigin(name)
        return {"type": "custom" if origin.custom else "function", "name": origin.name}


def failure_message(error: KvwsError) -> str:
    """What went wrong and what to do; where trying again helps, when."""
    retry_after_s = _retry_after_s(error)
    again = "" if retry_after_s is None else f"; try again in {retry_after_s} s"
    return f"{error}{again}"


def failure_code(error: KvwsError) -> str:
    """The code of an error inside a stream. Codex gives the turn up at context_length_exceeded and
    invalid_prompt, waits as long as the message says at rate_limit_exceeded, and soon asks again
    at server_error."""
    if isinstance(error, PromptTooLong):
        return "context_length_exceeded"
    if isinstance(error, BadRequest | PromptError):
        return "invalid_prompt"
    return "server_error" if _retry_after_s(error) is None else "rate_limit_exceeded"


def _retry_after_s(error: KvwsError) -> int | None:
    value: Any = getattr(error, "retry_after_s", None)
    return value if isinstance(value, int) else None


def _usage(usage: Usage) -> Payload:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.reused_tokens},
        "output_tokens": usage.answer_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.answer_tokens,
    }
