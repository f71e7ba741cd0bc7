"""What a wire dialect must know: how to read calls, and how to write answers and errors.

Pure: bytes and dictionaries in, calls and frames out. Timing, sockets and sessions are elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvws.chat.answer import AnswerEvent, Usage
from kvws.chat.call import ModelCall
from kvws.errors import KvwsError
from kvws.http.recollection import Recollection


@dataclass(frozen=True)
class SseEvent:
    """One server-sent event.

    Attributes:
        data: a JSON object, or the plain text of a sentinel such as "[DONE]".
        event: its name; None in dialects that name none.
    """

    data: Mapping[str, Any] | str
    event: str | None = None


@dataclass(frozen=True)
class ErrorReply:
    """An error in a dialect's own shape."""

    status: int
    body: Mapping[str, Any]


class AnswerWriter(Protocol):
    """Writes one answer. Every method but `whole` is for streams; events come in order.

    The stream is well formed whenever it ends: at `event(Finished)` or at `error`.
    """

    def begin(self, usage: Usage) -> Iterable[SseEvent]:
        """Frames to send at once, before the model said anything.

        Args:
            usage: what is known then: prompt_tokens, and how many will be reused.
        """
        ...

    def event(self, event: AnswerEvent) -> Iterable[SseEvent]: ...

    def ping(self) -> Iterable[SseEvent]:
        """Frames that say the server is alive; sent every few seconds of silence."""
        ...

    def stay_alive(self) -> Iterable[SseEvent]:
        """Frames that reset even a client's watchdog for stalled answers, and mean nothing else;
        sent rarely."""
        ...

    def error(self, error: KvwsError) -> Iterable[SseEvent]:
        """The last frames of an answer that failed after it began."""
        ...

    def whole(self, events: Sequence[AnswerEvent]) -> Mapping[str, Any]:
        """The body of an answer that is not streamed; `events` ends with Finished."""
        ...


class Dialect(Protocol):
    """One wire dialect."""

    @property
    def name(self) -> str:
        """For logs and metrics: "anthropic", "chat" or "responses"."""
        ...

    def read(self, body: object, recollection: Recollection | None = None) -> ModelCall:
        """The call in a decoded JSON body; unknown parts are skipped and counted.

        Args:
            recollection: of an earlier body of this dialect. It never changes what is read, only
                how long that takes, and afterwards remembers this body. Mutated.

        Raises:
            BadRequest: it is no call: says which part, and what is expected.
        """
        ...

    def writer(self, call: ModelCall) -> AnswerWriter: ...

    def error(self, error: KvwsError) -> ErrorReply: ...
