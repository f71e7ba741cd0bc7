"""Where a running server is, and how a client must ask it."""

from __future__ import annotations

from dataclasses import dataclass, field

MODEL_NAME = "kvws"
"""What clients call the model. The server answers to every name; this one looks like no other
vendor's, so no client guesses a window or a price for it."""

STALL_S = 1800
"""How long a client should wait for a server that is alive: a cold prompt of a million tokens
takes minutes, not seconds."""

ANSWER_TOKENS = 32_000
"""Longest answer that a client should ask for, where its settings want a number."""


@dataclass(frozen=True)
class ServerAddress:
    """A running server.

    Attributes:
        base_url: without a path, such as http://127.0.0.1:8080.
        api_key: what it asks for; None when it asks for none.
        window_tokens: longest prompt and answer together.
        model: the name of the model behind it, for people.
    """

    base_url: str
    api_key: str | None = field(repr=False)
    window_tokens: int
    model: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "base_url", self.base_url.rstrip("/"))

    @property
    def openai_url(self) -> str:
        """What OpenAI clients call the base URL."""
        return f"{self.base_url}/v1"

    @property
    def token(self) -> str:
        """The key, or a stand-in: most clients refuse to start without one."""
        return self.api_key or "not-needed"

    @property
    def answer_tokens(self) -> int:
        """Longest answer to ask for: no more than a quarter of the window."""
        return min(ANSWER_TOKENS, max(1, self.window_tokens // 4))
