"""What a request that was sent again may compute, by what it is to its thread."""

from __future__ import annotations

from typing import Literal

from kvws.blocks.key import BLOCK_TOKENS
from tests.acceptance.agent import OPEN_TOKENS
from tests.acceptance.recorded import Recorded, Sent, common_length

Kind = Literal["turn", "aside", "summary", "rewrite"]
"""turn: begins its thread, or goes on behind all that it knows. summary: an aside behind the
conversation itself. rewrite: the client changed its own history."""


def assert_reuse(sent: Sent, turns: list[Sent], kind: Kind) -> None:
    """
    Args:
        turns: those sent before; `sent` joins them if it is one.
    """
    number, usage = sent.recorded.number, sent.answered.usage
    computed = sent.answered.computed_tokens
    assert sent.answered.is_aside == (kind in ("aside", "summary")), number
    assert sent.prefilled_tokens <= 2 * (computed + 2 * BLOCK_TOKENS), "the engine did more"
    before = _continued(sent.recorded, turns)
    if kind in ("summary", "rewrite"):
        assert computed <= usage.prompt_tokens / 3, f"{number}: the beginning is known"
    elif kind == "turn" and before is not None:
        known = before.answered.usage
        new_tokens = usage.prompt_tokens - known.prompt_tokens - known.answer_tokens
        assert computed <= max(0, new_tokens) + OPEN_TOKENS, f"{number}: {usage} after {known}"
    elif kind == "turn":
        begins = all(turn.recorded.thread != sent.recorded.thread for turn in turns)
        assert begins, f"{number} does not continue its thread, and nobody said so"
    if kind in ("turn", "rewrite"):
        turns.append(sent)


def _continued(request: Recorded, turns: list[Sent]) -> Sent | None:
    """The latest turn whose whole history a request begins with."""
    for turn in reversed(turns):
        known = turn.recorded.messages
        of_thread = turn.recorded.thread == request.thread
        if of_thread and common_length(known, request.messages) == len(known):
            return turn
    return None
