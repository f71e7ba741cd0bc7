"""A recorded agent session, whatever the agent that recorded it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvws.chat.message import Message


@dataclass(frozen=True)
class TraceStep:
    """One model call.

    The model is called with `threads[thread][:context_messages]`; what it answered then is
    `threads[thread][context_messages]`.
    """

    thread: str
    context_messages: int


@dataclass(frozen=True)
class Trace:
    """A whole session.

    Invariant: each step names a thread of this trace, has at least one context message, and
    its recorded reply exists and is an assistant's. Not every assistant message is a step:
    history that a thread starts with was generated elsewhere.

    Attributes:
        name: for reports.
        format: the loader's name.
        threads: message lists by name. They only grow; where the agent rewrote its history
            (compaction, resumption, rewind) a new thread begins.
        steps: in chronological order, across threads.
        tools: JSON schemas that went with the requests; () where the recording has none.
        notes: what was left out and how often, one sentence each.
    """

    name: str
    format: str
    threads: Mapping[str, tuple[Message, ...]]
    steps: tuple[TraceStep, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for step in self.steps:
            messages = self.threads.get(step.thread, ())
            if not 0 < step.context_messages < len(messages):
                raise ValueError(f"{step} lies outside its thread of {len(messages)} messages")
            if messages[step.context_messages].role != "assistant":
                raise ValueError(f"the recorded reply of {step} is not an assistant's")

    def context(self, step: TraceStep) -> tuple[Message, ...]:
        """The message list that the model is called with."""
        return self.threads[step.thread][: step.context_messages]

    def reply(self, step: TraceStep) -> Message:
        """What the recorded model answered."""
        return self.threads[step.thread][step.context_messages]
