"""Which neighbours of a block go on with what is asked: those on the side where the asked words
stand. A pure decision."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import NamedTuple

from kvws.recall.text.terms import names, terms_of_name

_LEAST_RARITY = 0.5
"""A commoner word may stand anywhere by chance."""

_AS_RARE = 0.9
"""Of the rarest asked word in a block: as good a mark of what is asked."""


class Sides(NamedTuple):
    """Whether the block behind a block, and the one before it, go on with what is asked."""

    behind: bool
    before: bool


BOTH = Sides(behind=True, before=True)


def sides_of(text: str, asked: Set[str], rarity: Callable[[str], float]) -> Sides:
    """Where the rarest asked words of a block stand: the half of its text that they are in may be
    cut off from the rest. Neither side where there are none.

    Args:
        text: of the block.
        asked: terms of the question.
        rarity: how much a word tells, up to 1.
    """
    found: list[tuple[float, float]] = []  # rarity, middle of a name
    for begin, end in names(text):
        telling = max((rarity(t) for t in terms_of_name(text[begin:end]) if t in asked), default=0)
        found.append((telling, (begin + end) / 2))
    least = max(_LEAST_RARITY, _AS_RARE * max((telling for telling, _ in found), default=0))
    places = [place for telling, place in found if telling >= least]
    half = len(text) / 2
    return Sides(
        behind=any(place > half for place in places), before=any(place < half for place in places)
    )
