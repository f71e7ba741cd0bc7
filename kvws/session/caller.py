"""Who is calling: the session and the thread that a request belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MAIN_THREAD = "main"

IdentitySource = Literal[
    "x-kvws-workspace",
    "x-claude-code-session-id",
    "x-litellm-session-id",
    "x-session-id",
    "session-id",
    "prompt_cache_key",
    "metadata.user_id",
    "prompt",
]
"""What named the session; "prompt": nothing did, and it was told from its first messages."""


@dataclass(frozen=True)
class Caller:
    """One agent session, as its client names it.

    Attributes:
        session: the client's name of the session, or a digest of how its prompt begins. Valid:
            letters, digits and ._:- only, 1 to 128 of them. Not unique across API keys.
        thread: "main", or the name of a sub-agent; the same alphabet.
        source: what named the session.
    """

    session: str
    thread: str
    source: IdentitySource
