"""Messages as the model is shown them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class ToolCall:
    """One call that the model asked for.

    Attributes:
        id: what the tool's answer refers to; "" where the recording has none.
        name: the tool.
        arguments: JSON text.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """One entry of a message list, as the model is shown it.

    Attributes:
        role: who speaks; "tool" is the answer to a tool call. "system" may stand anywhere.
        content: plain text; "" for a turn that only calls tools.
        tool_calls: of an assistant turn, in the model's order.
        name: of a tool message: the tool that answers, where it is known.
        tool_call_id: of a tool message: the call that it answers, where it is known.
        reasoning: of an assistant turn: what it thought before it spoke, where the client kept it.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    tool_call_id: str | None = None
    reasoning: str = ""
