"""Output items while they are made: what an answer's parts look like, and the events of each.

    reasoning          a summary of one part: the one form of reasoning that Codex both shows and
                       sends back, so that the next prompt holds what was thought
    message            one part of text
    function_call      its arguments
    custom_tool_call   its input: known only at the end, the model writes it inside JSON

Events come without their sequence numbers.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any, Literal

from kvws.http.responses.tools import ToolOrigin, custom_input

Payload = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]


class OutputItem(ABC):
    """One item of an answer, open until `closing`.

    Attributes:
        text: what the model wrote of it so far.
    """

    prefix: str
    """How the ids of such items begin."""

    def __init__(self, item_id: str, output_index: int) -> None:
        self.id = item_id
        self.text = ""
        self._place: Payload = {"item_id": item_id, "output_index": output_index}

    def opening(self) -> list[Payload]:
        return [self._item_event("added", self.shown("in_progress")), *self._parts_begin()]

    def add(self, delta: str) -> list[Payload]:
        """Events for more of its text. Mutates self."""
        self.text += delta
        return self._delta(delta)

    def closing(self, status: Status) -> list[Payload]:
        """Mutates self: nothing can be added any more."""
        return [*self._parts_end(), self._item_event("done", self.shown(status))]

    @abstractmethod
    def shown(self, status: Status) -> Payload:
        """The item itself, as far as it goes."""

    @abstractmethod
    def _delta(self, delta: str) -> list[Payload]: ...

    @abstractmethod
    def _parts_end(self) -> list[Payload]: ...

    def _parts_begin(self) -> list[Payload]:
        return []

    def _item_event(self, what: str, item: Payload) -> Payload:
        return {
            "type": f"response.output_item.{what}",
            "output_index": self._place["output_index"],
            "item": item,
        }


class ReasoningItem(OutputItem):
    """What the model thinks."""

    prefix = "rs"

    def shown(self, status: Status) -> Payload:
        summary = [self._part()] if status != "in_progress" else []
        return {"type": "reasoning", "id": self.id, "summary": summary, "status": status}

    def _parts_begin(self) -> list[Payload]:
        return [self._event("part.added", part=self._part())]

    def _delta(self, delta: str) -> list[Payload]:
        return [self._event("text.delta", delta=delta)]

    def _parts_end(self) -> list[Payload]:
        return [
            self._event("text.done", text=self.text),
            self._event("part.done", part=self._part()),
        ]

    def _part(self) -> Payload:
        return {"type": "summary_text", "text": self.text}

    def _event(self, what: str, **fields: Any) -> Payload:
        kind = f"response.reasoning_summary_{what}"
        return {"type": kind, **self._place, "summary_index": 0, **fields}


class MessageItem(OutputItem):
    """What the model says."""

    prefix = "msg"

    def shown(self, status: Status) -> Payload:
        return {
            "type": "message",
            "id": self.id,
            "role": "assistant",
            "status": status,
            "content": [self._part()] if status != "in_progress" else [],
        }

    def _parts_begin(self) -> list[Payload]:
        return [self._event("content_part.added", part=self._part())]

    def _delta(self, delta: str) -> list[Payload]:
        return [self._event("output_text.delta", delta=delta, logprobs=[])]

    def _parts_end(self) -> list[Payload]:
        return [
            self._event("output_text.done", text=self.text, logprobs=[]),
            self._event("content_part.done", part=self._part()),
        ]

    def _part(self) -> Payload:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def _event(self, what: str, **fields: Any) -> Payload:
        return {"type": f"response.{what}", **self._place, "content_index": 0, **fields}


class CallItem(OutputItem):
    """A tool call; `text` is the JSON text of its arguments."""

    def __init__(self, item_id: str, output_index: int, call_id: str, origin: ToolOrigin) -> None:
        super().__init__(item_id, output_index)
        self._named: Payload = {"id": item_id, "call_id": call_id, "name": origin.name}
        if origin.namespace is not None:
            self._named["namespace"] = origin.namespace

    @property
    def is_cut(self) -> bool:
        """Whether the arguments end before they are JSON."""
        try:
            json.loads(self.text or "{}")
        except (ValueError, RecursionError):
            return True
        return False


class FunctionCallItem(CallItem):
    """A call of a function."""

    prefix = "fc"

    def shown(self, status: Status) -> Payload:
        arguments = self.text if status == "in_progress" else self._arguments
        return {"type": "function_call", **self._named, "arguments": arguments, "status": status}

    @property
    def _arguments(self) -> str:
        return self.text or "{}"

    def _delta(self, delta: str) -> list[Payload]:
        return [self._event("delta", delta=delta)]

    def _parts_end(self) -> list[Payload]:
        never_came = [] if self.text else [self._event("delta", delta=self._arguments)]
        name = self._named["name"]
        return [*never_came, self._event("done", arguments=self._arguments, name=name)]

    def _event(self, what: str, **fields: Any) -> Payload:
        return {"type": f"response.function_call_arguments.{what}", **self._place, **fields}


class CustomCallItem(CallItem):
    """A call of a tool whose input is free text."""

    prefix = "ctc"

    def shown(self, status: Status) -> Payload:
        text = "" if status == "in_progress" else custom_input(self.text)
        return {"type": "custom_tool_call", **self._named, "input": text, "status": status}

    def _delta(self, delta: str) -> list[Payload]:
        return []

    def _parts_end(self) -> list[Payload]:
        text = custom_input(self.text)
        delta = [self._event("delta", delta=text)] if text else []
        return [*delta, self._event("done", input=text)]

    def _event(self, what: str, **fields: Any) -> Payload:
        return {"type": f"response.custom_tool_call_input.{what}", **self._place, **fields}
