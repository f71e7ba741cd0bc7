"""Parts of a prompt that the model must not lose sight of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Tokens begin … end - 1 of a prompt."""

    begin: int
    end: int


@dataclass(frozen=True)
class PromptSpans:
    """Where in a prompt the parts are that a view keeps, as far as they fit.

    Attributes:
        system: system prompt and tool schemas.
        policies: the project's standing instructions, the newest version of each.
        task: what the user asked last.
        trajectory: everything since then: the agent's turns and what its tools answered.
    """

    system: Span | None = None
    policies: tuple[Span, ...] = ()
    task: Span | None = None
    trajectory: Span | None = None
