"""Words that the simulated model tells apart: a query about a topic scores the blocks about it.

A token's topic is told by its id (`tests.step.simulated_engine.topic_of`). These words are one
token each, and chat markup has none of their topic.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.acceptance.front import Front
from tests.step.simulated_engine import topic_of

DETAIL_WORDS = (
    "cards", "bear", "drain", "accident", "routine", "trip", "insects", "doubt", "maps",
    "delivery", "occasion", "flag", "meals", "editor", "consumer", "reliable",
)  # fmt: skip
OTHER_WORDS = (
    "summer", "rock", "member", "basis", "peace", "core", "cold", "distance", "coast",
    "element", "worth", "setting", "gender", "equal", "config", "perhaps",
)  # fmt: skip

DETAIL = " " + " ".join(DETAIL_WORDS * 6)
"""Of three blocks."""

QUESTION = "Which of these was it?" + " " + " ".join(DETAIL_WORDS * 2)


def filler(words: int, seed: int = 0) -> str:
    """Text about something else; different for each seed."""
    return " ".join(OTHER_WORDS[(n * (seed + 1) + seed) % len(OTHER_WORDS)] for n in range(words))


def assert_topics_are_apart(front: Front) -> None:
    def topics(words: Sequence[str]) -> set[int]:
        ids = [front.tokens(f" {word}") for word in words]
        assert all(len(each) == 1 for each in ids)
        return {topic_of(token) for (token,) in ids}

    assert len(topics(DETAIL_WORDS)) == 1
    assert not topics(DETAIL_WORDS) & topics(OTHER_WORDS)


def detail_words_in(text: str) -> int:
    """The longest run of the detail in a text, in words."""
    longest = run = 0
    for word in text.split():
        run = run + 1 if word in DETAIL_WORDS else 0
        longest = max(longest, run)
    return longest
