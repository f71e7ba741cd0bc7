"""A Claude Code message list under construction: turns arrive in pieces."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvws.chat.message import Message, Role, ToolCall


@dataclass
class Draft:
    """One message to which blocks may still be added."""

    role: Role
    texts: list[str] = field(default_factory=list[str])
    tool_calls: list[ToolCall] = field(default_factory=list[ToolCall])
    name: str | None = None
    tool_call_id: str | None = None

    def message(self) -> Message:
        return Message(
            self.role, "\n".join(self.texts), tuple(self.tool_calls), self.name, self.tool_call_id
        )


class ThreadDraft:
    """Drafts in order. Drafts are only appended, so that an index names one for good.

    Attributes:
        name: the thread's.
        drafts: so far.
        last_assistant: index of the newest assistant draft; -1 before the first.
        last_written: index of the draft that the newest line went to; -1 before the first.
    """

    def __init__(self, name: str, history: tuple[Draft, ...] = ()) -> None:
        self.name = name
        self.drafts: list[Draft] = list(history)
        self.last_written = len(history) - 1
        self.last_assistant = max(
            (n for n, draft in enumerate(history) if draft.role == "assistant"), default=-1
        )
        self._turns: dict[str, int] = {}

    def turn(self, message_id: str) -> Draft | None:
        """The assistant draft with that id, which the newest line goes to. Mutates self."""
        index = self._turns.get(message_id) if message_id else None
        if index is None:
            return None
        self.last_written = index
        return self.drafts[index]

    def begin_turn(self, message_id: str) -> Draft:
        """Append an empty assistant draft. Mutates self."""
        draft = Draft("assistant")
        self.append(draft)
        self.last_assistant = self.last_written
        self._turns[message_id] = self.last_written
        return draft

    def append(self, draft: Draft) -> None:
        """Mutates self."""
        self.drafts.append(draft)
        self.last_written = len(self.drafts) - 1

    def up_to(self, index: int) -> tuple[Draft, ...]:
        """The drafts through `index` and the tool results that directly follow it."""
        end = index + 1
        while end < len(self.drafts) and self.drafts[end].role == "tool":
            end += 1
        return tuple(self.drafts[:end])

    def messages(self) -> tuple[Message, ...]:
        return tuple(draft.message() for draft in self.drafts)
