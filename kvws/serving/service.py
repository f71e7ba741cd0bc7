"""What the HTTP front needs of the rest of kvws."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from kvws.chat.answer import AnswerEvent, Usage
from kvws.chat.call import ModelCall
from kvws.session.caller import Caller


class Admitted(Protocol):
    """A call that will be answered: its prompt is known and fits."""

    @property
    def usage(self) -> Usage:
        """The prompt's tokens, and how many of them are known already."""
        ...

    def events(self) -> AsyncGenerator[AnswerEvent, None]:
        """Make the answer. Closing the generator early aborts the engine's work within 100 ms;
        what was computed stays.

        Raises:
            KvwsError: the answer fails, before or after its first event.
        """
        ...


class ModelService(Protocol):
    """Answers model calls."""

    @property
    def model(self) -> str:
        """How the served model is called."""
        ...

    @property
    def window_tokens(self) -> int:
        """Longest prompt and answer together, as clients see it."""
        ...

    async def admit(self, call: ModelCall, caller: Caller, *, salt: str) -> Admitted:
        """Place a call in its session.

        Args:
            salt: of the API key that asks; nothing is shared between salts.

        Raises:
            PromptTooLong: the prompt does not fit the window.
            PromptError: the model's template refuses the messages.
        """
        ...

    async def count_tokens(self, call: ModelCall) -> int:
        """Tokens of the call's prompt, without any session.

        Raises:
            PromptError: as `admit`.
        """
        ...

    async def inspect(self, *, salt: str) -> dict[str, Any]:
        """Figures of all sessions together, tiers and engine, for people and for metrics, and a
        list of the salt's own sessions."""
        ...

    async def inspect_session(self, session: str, *, salt: str) -> dict[str, Any] | None:
        """Threads and the latest steps of one session; None if the salt has none of that name."""
        ...
