"""How a model's tokens become an answer: what must be known of its chat format."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvws.chat.answer import FinishReason, Reasoning, Text, ToolArguments, ToolCallBegun
from kvws.chat.call import ModelCall
from kvws.engine.protocol import Chunk


class PreparedCall(Protocol):
    """What a call asks of engine and template."""

    @property
    def sampling(self) -> Mapping[str, Any]:
        """Sampling parameters as the engine spells them, without a length."""
        ...

    @property
    def template_options(self) -> Mapping[str, Any]:
        """Further arguments of the chat template."""
        ...

    @property
    def dropped(self) -> Sequence[str]:
        """What of the call has no effect with this model or engine, one phrase each."""
        ...


@dataclass(frozen=True)
class Ended:
    """An answer's parts are complete.

    Attributes:
        stop_text: the text of the client's that ended it, with reason "stop_text".
        reasoning_tokens: generated tokens that were reasoning.
    """

    reason: FinishReason
    stop_text: str | None = None
    reasoning_tokens: int = 0


AnswerPart = Reasoning | Text | ToolCallBegun | ToolArguments | Ended


class AnswerFormat(Protocol):
    """A model's way to write reasoning and tool calls."""

    def prepare(self, call: ModelCall) -> PreparedCall:
        """What a call means for engine and template.

        Raises:
            BadRequest: a tool, a schema or a sampling parameter is no such thing.
        """
        ...

    def events(
        self, prepared: Any, chunks: AsyncGenerator[Chunk, None], *, opening: str = ""
    ) -> AsyncGenerator[AnswerPart, None]:
        """Read an answer as it is generated; `Ended` is last. Closing it early closes `chunks`.

        Args:
            prepared: what `prepare` made of the call.
            chunks: of one answer.
            opening: how the prompt opens the assistant's turn.
        """
        ...
