"""OpenHands v0 runs: a flat list of action and observation events.

A run's object holds the list under `history`, beside its `instruction`; an exported trajectory
is the list alone; early runs pair each action with its observation. What becomes of an event:

    action system             the system prompt; its tools are the trace's
    action message            of the user or, where the agent says something, a turn
    actions of the agent      turns; several calls of one response are one turn. With a
                              recorded response as the model wrote it, else with a tool call
                              made of the event, else, before tool calls, as text
    observations              the result of the call that they carry or name as their `cause`;
                              where that is no tool call, a user message
    action condensation       events are forgotten, a summary may stand in for them: thread
                              "main#2", …
    null, agent state, …      never in a prompt

What the agent's templates write around a text (the workspace of a recall, the exit code of a
command) is not recorded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from kvws.errors import TraceError
from kvws.replay.loaders.content import Skipped, clean, is_list, is_mapping, mapping, string
from kvws.replay.loaders.openhands_event import (
    CONDENSATION,
    details,
    is_action,
    is_agents,
    is_event,
    is_turn,
    is_unseen,
    kind_of,
)
from kvws.replay.loaders.openhands_thread import EventThread
from kvws.replay.loaders.source import Document
from kvws.replay.trace import Trace, TraceStep

FORMAT = "openhands-v0"

_MAX_MESSAGES = 4_000_000
"""Over all threads. Each condensation repeats what it keeps: memory needs a limit of its own."""

Event = dict[str, Any]


def recognises(document: Document) -> bool:
    return any(is_event(entry) for entry in _entries(document))


def load(document: Document, name: str) -> Trace:
    """Raises: TraceError: condensations that repeat more than memory should hold."""
    reader = _Reader()
    events: list[Event] = []
    for entry in _entries(document):
        if is_event(entry):
            events.append(mapping(entry))
        else:
            reader.skipped.note("entries that are no events skipped")
    for event in _instructed(events, string(mapping(document.value).get("instruction"))):
        reader.read(event)
    return Trace(
        name=name,
        format=FORMAT,
        threads={each.name: tuple(each.messages) for each in reader.threads if each.messages},
        steps=tuple(reader.steps),
        tools=reader.tools,
        notes=reader.skipped.notes(),
    )


def _entries(document: Document) -> Iterator[object]:
    """The entries of the history, pairs taken apart."""
    history = mapping(document.value).get("history", document.value)
    for entry in history if is_list(history) else ():
        if is_list(entry):
            yield from entry
        else:
            yield entry


def _instructed(events: list[Event], instruction: str) -> list[Event]:
    """`events`, with the run's instruction before the first turn if nobody asked for anything."""
    first_turn = next((n for n, event in enumerate(events) if is_turn(event)), len(events))
    is_asked = any(
        is_action(event) and kind_of(event) == "message" and not is_agents(event)
        for event in events[:first_turn]
    )
    if is_asked or not instruction:
        return events
    asked = {"action": "message", "source": "user", "content": instruction}
    return [*events[:first_turn], asked, *events[first_turn:]]


class _Reader:
    """Events in, threads out, in file order, which is chronological.

    Attributes:
        threads: in order of appearance.
        steps: in chronological order.
        tools: the first that were offered.
        skipped: what never reached the model, or reached it changed.
    """

    def __init__(self) -> None:
        self.threads: list[EventThread] = [EventThread("main")]
        self.steps: list[TraceStep] = []
        self.tools: tuple[dict[str, Any], ...] = ()
        self.skipped = Skipped()
        self._view: list[Event] = []
        self._summary: tuple[int, Event] | None = None
        self._messages = 0

    def read(self, event: Event) -> None:
        """Take one event. Mutates self."""
        if is_action(event) and kind_of(event) == CONDENSATION:
            self._condense(details(event))
            return
        if is_unseen(event):
            self.skipped.note(f"{kind_of(event)[:40]} events skipped")
            return
        if is_action(event) and kind_of(event) == "system":
            self.tools = self.tools or _tools(details(event))
        self._view.append(event)
        thread = self.threads[-1]
        if turn := thread.take(event, self.skipped):  # a turn at index 0 answers nothing
            self.steps.append(TraceStep(thread.name, turn))

    def _condense(self, fields: dict[str, Any]) -> None:
        """Begin a thread with the events that the agent goes on with. Mutates self."""
        forgets = _forgotten(fields)
        self._view = [event for event in self._view if not forgets(event.get("id"))]
        if summary := string(fields.get("summary")):
            offset = fields.get("summary_offset")
            position = offset if isinstance(offset, int) and offset >= 0 else len(self._view)
            self._summary = position, {"observation": "condense", "content": summary}
        seen = list(self._view)
        if self._summary:
            seen.insert(*self._summary)
        self._messages += len(self.threads[-1].messages)
        if self._messages + len(seen) > _MAX_MESSAGES:
            raise TraceError(
                f"the run's threads hold more than {_MAX_MESSAGES} messages",
                hint="split the recording",
            )
        thread = EventThread(f"main#{len(self.threads) + 1}")
        for event in seen:
            thread.take(event, Skipped())  # what it skips is counted already
        thread.drop_unanswered()
        self.threads.append(thread)
        self.skipped.note("condensations, each begins a new thread")


def _forgotten(fields: dict[str, Any]) -> Callable[[object], bool]:
    """Which event ids a condensation forgets: those it lists, or from a first to a last one."""
    if is_list(listed := fields.get("forgotten_event_ids")):
        ids = {each for each in listed if isinstance(each, int)}
        return lambda event_id: isinstance(event_id, int) and event_id in ids
    first, last = fields.get("forgotten_events_start_id"), fields.get("forgotten_events_end_id")
    if isinstance(first, int) and isinstance(last, int):
        return lambda event_id: isinstance(event_id, int) and first <= event_id <= last
    return lambda event_id: False


def _tools(fields: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    offered = fields.get("tools")
    schemas = [tool for tool in offered if is_mapping(tool)] if is_list(offered) else []
    return tuple(json.loads(clean(json.dumps(schemas, ensure_ascii=False))))
