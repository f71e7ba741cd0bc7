"""An OpenHands message list under construction: events in, messages out."""

from __future__ import annotations

from typing import Any

from kvws.chat.message import Message, ToolCall
from kvws.replay.loaders.chat_message import read_messages
from kvws.replay.loaders.content import Skipped, is_list, is_mapping, json_text, mapping, string
from kvws.replay.loaders.openhands_event import (
    action_text,
    arguments,
    is_action,
    is_turn,
    kind_of,
    observation_text,
    thought,
)


class EventThread:
    """Messages in order.

    Invariant: the results of a turn stand directly behind it, whatever happened before they came,
    so messages change place only behind the last turn.

    Attributes:
        name: the thread's.
        messages: so far.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.messages: list[Message] = []
        self._results_end = 0
        self._turn_calls: set[str] = set()
        self._response_id = ""
        self._tool_names: dict[str, str] = {}
        self._call_of_event: dict[object, str] = {}

    def take(self, event: dict[str, Any], skipped: Skipped) -> int | None:
        """Take one event; the index of the turn that it begins. Mutates self and `skipped`."""
        if is_turn(event):
            return self._take_turn(event, skipped)
        if not is_action(event):
            self._take_observation(event, skipped)
        elif kind_of(event) == "recall":
            skipped.note("recall events skipped")
        else:
            role = "system" if kind_of(event) == "system" else "user"
            self.messages.append(Message(role, action_text(event, skipped)))
        return None

    def drop_unanswered(self) -> None:
        """Drop the turns that lack a result, which no prompt may hold. Mutates self."""
        kept: list[Message] = []
        index = 0
        while index < len(self.messages):
            end = index + 1
            while end < len(self.messages) and self.messages[end].role == "tool":
                end += 1
            answered = {message.tool_call_id for message in self.messages[index + 1 : end]}
            if all(call.id in answered for call in self.messages[index].tool_calls):
                kept += self.messages[index:end]
            index = end
        self.messages = kept
        self._results_end = len(kept)
        self._turn_calls = set()
        self._tool_names = {call.id: call.name for turn in kept for call in turn.tool_calls}

    def _take_turn(self, event: dict[str, Any], skipped: Skipped) -> int | None:
        metadata = mapping(event.get("tool_call_metadata"))
        call_id = string(metadata.get("tool_call_id"))
        if call_id:
            self._note_call(event, call_id)
        response = mapping(metadata.get("model_response"))
        response_id = string(response.get("id"))
        if call_id in self._turn_calls and response_id and response_id == self._response_id:
            return None
        if call_id:
            turn = _recorded_turn(response, call_id, skipped) or _called_turn(event, call_id)
        else:
            turn = Message("assistant", action_text(event, skipped))
        if not turn.content and not turn.tool_calls:
            skipped.note("empty turns skipped")
            return None
        self.messages.append(turn)
        self._results_end = len(self.messages)
        self._turn_calls = {call.id for call in turn.tool_calls}
        self._response_id = response_id
        self._tool_names.update((call.id, call.name) for call in turn.tool_calls)
        return len(self.messages) - 1

    def _take_observation(self, event: dict[str, Any], skipped: Skipped) -> None:
        text = observation_text(event, skipped)
        metadata = mapping(event.get("tool_call_metadata"))
        call_id = string(metadata.get("tool_call_id")) or self._cause(event)
        if not call_id:
            if text or kind_of(event) != "recall":
                self.messages.append(Message("user", text))
            else:
                skipped.note("recall events skipped")
            return
        if call_id not in self._tool_names:
            skipped.note("tool results without their call skipped")
            return
        result = Message("tool", text, name=self._tool_names[call_id], tool_call_id=call_id)
        if call_id in self._turn_calls:
            self.messages.insert(self._results_end, result)
            self._results_end += 1
        else:
            self.messages.append(result)

    def _note_call(self, event: dict[str, Any], call_id: str) -> None:
        if isinstance(event.get("id"), int | str):
            self._call_of_event[event["id"]] = call_id

    def _cause(self, event: dict[str, Any]) -> str:
        """The call that an observation answers, "" where its cause is none."""
        cause = event.get("cause")
        return self._call_of_event.get(cause, "") if isinstance(cause, int | str) else ""


def _recorded_turn(response: dict[str, Any], call_id: str, skipped: Skipped) -> Message | None:
    """The turn as the model wrote it, if it is recorded and holds the call."""
    choices = response.get("choices")
    message = mapping(choices[0] if is_list(choices) and choices else None).get("message")
    if not is_mapping(message):
        return None
    turn = read_messages([{**message, "role": "assistant"}], skipped)[0]
    return turn if any(call.id == call_id for call in turn.tool_calls) else None


def _called_turn(event: dict[str, Any], call_id: str) -> Message:
    """The turn that an action stands for."""
    name = string(mapping(event.get("tool_call_metadata")).get("function_name"))
    call = ToolCall(call_id, name or kind_of(event), json_text(arguments(event)))
    return Message("assistant", thought(event), tool_calls=(call,))
