"""A model call by a client, freed from the dialect that it came in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvws.chat.message import Message


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. None: as the model's own generation settings say.

    Attributes:
        stop: texts that end the answer and are not part of it.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class ToolChoice:
    """Whether tools are called. `name`: the one that must be, if a particular one."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None


@dataclass(frozen=True)
class ModelCall:
    """What a client asks of the model.

    Attributes:
        model: as the client names it; every name is served by the one model there is.
        messages: at least one; not yet rendered.
        tools: as chat completions spell them: {"type": "function", "function": {"name", …}}.
        tool_choice: which of them may or must be called.
        parallel_tool_calls: whether one answer may hold several calls.
        max_tokens: longest answer; None when the client leaves it open.
        sampling: how tokens are drawn.
        thinking: whether the model should reason first; None leaves it to the model.
        effort: "low", "medium", "high", … as the client spells it; None if it did not say.
        json_schema: a JSON schema that the answer must follow; {} for any JSON; None for text.
        stream: whether the answer is sent as it is made.
        include_usage: whether a stream ends with usage, where the dialect leaves that open.
        side_call: not a turn of the conversation but an aside of the client's own (a title, a
            web search, a summary); it must leave no trace in the thread.
        dropped: what the request held that no model here could use, one phrase each; for the log.
    """

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    parallel_tool_calls: bool = True
    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    thinking: bool | None = None
    effort: str | None = None
    json_schema: Mapping[str, Any] | None = None
    stream: bool = False
    include_usage: bool = True
    side_call: bool = False
    dropped: tuple[str, ...] = ()
