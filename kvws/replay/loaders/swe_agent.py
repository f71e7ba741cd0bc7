"""SWE-agent trajectories: a `history` of chat messages beside the `trajectory` of the steps.

The history is the message list itself, with tool calls or with actions as text. Each agent of
it is a thread: the first "main", others "agent-1", …. Demonstrations are context. The history
is whole, though the agent may have been shown old observations shortened.

Without a history the steps of the trajectory are put in its place: what the first one was
asked, then responses and observations as text.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from kvws.chat.message import Message
from kvws.replay.loaders.chat_message import read_messages
from kvws.replay.loaders.content import Skipped, flatten, is_list, mapping, string
from kvws.replay.loaders.source import Document
from kvws.replay.trace import Trace, TraceStep

FORMAT = "swe-agent"

_PROMPT_KEYS = ("query", "messages")


def recognises(document: Document) -> bool:
    fields = mapping(document.value)
    if not is_list(fields.get("trajectory")):
        return False
    return any("role" in entry for entry in _history(fields)) or any(
        "observation" in step and ("response" in step or "action" in step)
        for step in _trajectory(fields)
    )


def load(document: Document, name: str) -> Trace:
    fields = mapping(document.value)
    reader = _Reader()
    entries = _history(fields)
    if not any("role" in entry for entry in entries):
        entries = list(_from_trajectory(_trajectory(fields), reader.skipped))
        reader.skipped.note("histories missing, rebuilt from the trajectory")
    for entry in entries:
        reader.read(entry)
    return Trace(
        name=name,
        format=FORMAT,
        threads={thread: tuple(messages) for thread, messages in reader.threads.items()},
        steps=tuple(reader.steps),
        notes=reader.skipped.notes(),
    )


def _history(fields: dict[str, Any]) -> list[dict[str, Any]]:
    entries = fields.get("history")
    return [mapping(entry) for entry in entries] if is_list(entries) else []


def _trajectory(fields: dict[str, Any]) -> list[dict[str, Any]]:
    return [mapping(step) for step in fields["trajectory"]]


class _Reader:
    """History entries in, threads out, in file order, which is chronological.

    Attributes:
        threads: in order of appearance.
        steps: in chronological order.
        skipped: what is left out.
    """

    def __init__(self) -> None:
        self.threads: dict[str, list[Message]] = {}
        self.steps: list[TraceStep] = []
        self.skipped = Skipped()
        self._thread_of: dict[str, str] = {}
        self._last_thread = "main"
        self._tool_names: dict[str, str] = {}

    def read(self, entry: dict[str, Any]) -> None:
        """Take one entry. Mutates self."""
        for message in read_messages([self._as_chat(entry)], self.skipped):
            self._tool_names.update((call.id, call.name) for call in message.tool_calls)
            if message.role == "assistant" and not message.content and not message.tool_calls:
                self.skipped.note("empty turns skipped")
                continue
            thread = self._last_thread = self._thread(string(entry.get("agent")))
            messages = self.threads.setdefault(thread, [])
            if message.role == "assistant" and messages and entry.get("is_demo") is not True:
                self.steps.append(TraceStep(thread, len(messages)))
            messages.append(message)

    def _as_chat(self, entry: dict[str, Any]) -> dict[str, Any]:
        """The entry with the call that it answers where chat messages have it."""
        answered = entry.get("tool_call_ids")
        if entry.get("role") != "tool" or not is_list(answered) or not answered:
            return entry
        call_id = string(answered[0])
        return {**entry, "tool_call_id": call_id, "name": self._tool_names.get(call_id)}

    def _thread(self, agent: str) -> str:
        """An agent's thread; where none is named, that of the entry before. Mutates self."""
        if not agent:
            return self._last_thread
        number = len(self._thread_of)
        return self._thread_of.setdefault(agent, f"agent-{number}" if number else "main")


def _from_trajectory(steps: list[dict[str, Any]], skipped: Skipped) -> Iterator[dict[str, Any]]:
    """A history as the steps tell it. Mutates `skipped`."""
    prompts = (steps[0].get(key) for key in _PROMPT_KEYS if steps)
    for prompt in [prompt for prompt in prompts if is_list(prompt)][:1]:
        yield from takewhile(_is_before_the_first_turn, map(mapping, prompt))
    for step in steps:
        if not (turn := _turn_text(step)):
            skipped.note("empty turns skipped")
            continue
        yield {"role": "assistant", "content": turn}
        yield {"role": "user", "content": flatten(step.get("observation"), skipped)}


def _is_before_the_first_turn(entry: dict[str, Any]) -> bool:
    return entry.get("role") != "assistant" or entry.get("is_demo") is True


def _turn_text(step: dict[str, Any]) -> str:
    """The response of a step; its action is added where it went as a tool call beside it."""
    said = string(step.get("response")) or string(step.get("thought"))
    action = string(step.get("action")).strip()
    if not action or action in said:
        return said
    return "\n\n".join(filter(None, (said, f"```\n{action}\n```")))
