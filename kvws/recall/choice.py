"""From a ranking to the blocks that take the places of a view. A pure decision."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvws.recall.fusion import Ranking
from kvws.recall.recipe import Recipe, SignalName
from kvws.recall.regions import Reason


@dataclass(frozen=True, slots=True)
class Chosen:
    """A block that deserves a place, and why.

    Attributes:
        score: what the signals give it together.
        ranks: of the signals that rank it, from 0.
        signal: the one that gives most; None for a block that came with another.
    """

    block: int
    reason: Reason
    score: float
    ranks: dict[SignalName, int]
    signal: SignalName | None


class NewerCopy(Protocol):
    def __call__(self, block: int, among: Container[int], /) -> tuple[int, ...] | None:
        """The blocks of `among` that say later what a block says, oldest first, or None."""
        ...


def choose(
    ranking: Ranking,
    recipe: Recipe,
    *,
    anchors: Sequence[int],
    most: int,
    fixed: Set[int],
    neighbours: Callable[[int], tuple[int, ...]],
    newer_copy: NewerCopy,
) -> list[Chosen]:
    """Walk down a ranking.

    First the anchors, then the neighbours of each, because what answers a question often begins in
    one block and ends in the next. Then the fused order.

    Args:
        anchors: blocks that come first, best first.
        most: blocks wanted, those that just missed a place included.
        fixed: blocks of the view that do not compete.
        neighbours: the blocks right behind and right before a block in the line it stands in.
    """
    competing = _Competing(ranking, fixed)
    taken: dict[int, Chosen] = {}

    def take(block: int, reason: Reason) -> None:
        place = competing.place_of(block)
        if place is None or block in taken or len(taken) >= most:
            return
        signal = None if reason is Reason.NEIGHBOUR else ranking.loudest(place)
        score = float(ranking.scores[place])
        taken[block] = Chosen(block, reason, score, ranking.ranks_at(place), signal)

    for hit in anchors:
        take(hit, Reason.ANCHOR)
    for hit in anchors if recipe.anchor_neighbours else ():
        for block in neighbours(hit):
            take(block, Reason.NEIGHBOUR)
    for block in map(int, ranking.blocks):
        if len(taken) >= most:
            break
        if block in taken:
            continue
        newer = newer_copy(block, competing) if recipe.newest_copies else None
        if newer is None:
            take(block, Reason.SCORE)
        else:
            for copy in newer:
                take(copy, Reason.NEWEST_COPY)
    return list(taken.values())


class _Competing:
    """The blocks that a view can hold: those that are ranked, and those that do not compete."""

    def __init__(self, ranking: Ranking, fixed: Set[int]) -> None:
        self._fixed = fixed
        self._places = np.full(int(ranking.blocks.max(initial=-1)) + 1, -1, dtype=np.int64)
        self._places[ranking.blocks] = np.arange(len(ranking.blocks))

    def place_of(self, block: int) -> int | None:
        """The block's place in the ranking."""
        place = int(self._places[block]) if block < len(self._places) else -1
        return place if place >= 0 else None

    def __contains__(self, block: object) -> bool:
        return isinstance(block, int) and (
            block in self._fixed or self.place_of(block) is not None
        )
