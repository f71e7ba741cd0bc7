"""An answer as it is made: a stream of events that every dialect has a way to write.

    (Reasoning | Text | ToolCallBegun ToolArguments*)*  Finished

Tool calls are numbered from 0 in the order in which they begin, and never interleave: the
arguments of one end where the next event of another kind begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "tool_calls", "stop_text"]
"""Why an answer ended; "stop_text": at one of the texts that the client had named."""


@dataclass(frozen=True)
class Usage:
    """Tokens of one call. The prompt is the client's whole prompt, wherever its KV came from.

    Attributes:
        prompt_tokens: of the whole prompt.
        reused_tokens: those of them that were not computed for this call, from whatever tier.
        stored_tokens: those of them that were, and can be reused from now on.
        answer_tokens: generated, reasoning and tool calls included.
        reasoning_tokens: those of them that were reasoning.
    """

    prompt_tokens: int
    reused_tokens: int = 0
    stored_tokens: int = 0
    answer_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True)
class Reasoning:
    """More of what the model thinks. Not empty."""

    text: str


@dataclass(frozen=True)
class Text:
    """More of what the model says. Not empty."""

    text: str


@dataclass(frozen=True)
class ToolCallBegun:
    """The model calls a tool; its arguments follow.

    Attributes:
        index: from 0.
        id: unique in the session; the client's next prompt names it.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolArguments:
    """More of the JSON text of a call's arguments. Not empty. A call whose arguments never came
    has the arguments {}."""

    index: int
    json_text: str


@dataclass(frozen=True)
class Finished:
    """The answer is complete.

    Attributes:
        stop_text: the text that ended it, with reason "stop_text".
    """

    reason: FinishReason
    usage: Usage
    stop_text: str | None = None


AnswerEvent = Reasoning | Text | ToolCallBegun | ToolArguments | Finished
