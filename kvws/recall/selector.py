"""Choosing blocks for the views of one workspace: a recipe, and what its blocks say.

```
what blocks say, their age ── first look ─┬──▶ fuse ─▶ choose ─▶ the blocks that deserve a place
                                          ▼     ▲
                              shortlist of many ┴── scores of the ranks
```
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvws.recall.asking import asks
from kvws.recall.choice import Chosen, choose
from kvws.recall.fusion import Scores, fuse
from kvws.recall.own_words import own_words
from kvws.recall.plan import places_for_chosen, wanted_of_ranking
from kvws.recall.recipe import Question, Recipe, SignalName
from kvws.recall.regions import Regions, place_of
from kvws.recall.text.index import TextIndex
from kvws.recall.text.sides import BOTH, Sides
from kvws.recall.text.spelling import Spelling

Rows = npt.NDArray[np.uint8]


class Log(Protocol):
    """The block tree that is chosen from: a workspace."""

    @property
    def block_count(self) -> int: ...
    def exists(self, block: int) -> bool: ...
    def block_tokens(self, block: int) -> tuple[int, ...]: ...
    def parent(self, block: int) -> int | None: ...


@dataclass(frozen=True)
class Asked:
    """What blocks are chosen for.

    Attributes:
        line: the thread's blocks.
        question: tokens behind them that are no blocks yet.
        own: [tokens] 1 where one of `again` and `question` counts, as `content_rows` says.
        again: tokens of the task that are asked again in front of them.
        regions: of the view.
        candidates: [blocks] 1 where a block competes.
        in_view: blocks that the device may still hold for the thread.
        budget_blocks: size of a freshly selected view.
    """

    line: Sequence[int]
    question: Sequence[int]
    own: Rows
    regions: Regions
    candidates: npt.NDArray[np.uint8]
    in_view: frozenset[int]
    budget_blocks: int
    again: Sequence[int] = ()

    def own_tokens(self) -> tuple[list[int], list[int]]:
        """The tokens that count: of the task asked again, and of the question."""
        repeated = len(self.again)
        return _where(self.again, self.own[:repeated]), _where(self.question, self.own[repeated:])


@dataclass(frozen=True)
class Choice:
    """What was chosen, and by what.

    Attributes:
        chosen: blocks that deserve a place in the view, the most deserving first.
        signals: of the recipe, those that had anything to say.
    """

    chosen: Sequence[Chosen]
    signals: tuple[SignalName, ...]


class Selector:
    """Chooses by a recipe. Holds what the blocks of one workspace say."""

    def __init__(self, recipe: Recipe, spelling: Spelling | None = None) -> None:
        """`spelling`: None where text cannot be read."""
        self.recipe = recipe
        self._spelling = spelling
        self._texts = TextIndex(spelling) if spelling is not None and recipe.needs_text else None

    def by(self, recipe: Recipe) -> Selector:
        """A selector by another recipe, which shares what is known of the blocks."""
        other = copy(self)
        other.recipe = recipe
        return other

    def catch_up(self, log: Log, at_most: int) -> bool:
        """Read blocks that are new. Returns whether none is left."""
        if self._texts is None:
            return True
        return self._texts.catch_up(
            log.block_count, log.exists, log.block_tokens, log.parent, at_most=at_most
        )

    def content_rows(self, question: Sequence[int], again: Sequence[int] = ()) -> Rows:
        """[tokens of both] 1 where a token that a probe asks with counts for content.

        Args:
            again: tokens of the task, asked in front of the question.
        """
        if self._spelling is None:
            return np.ones(len(again) + len(question), dtype=np.uint8)
        parts = (own_words(part, self._spelling) for part in (again, question))
        return np.concatenate(list(parts))

    def first_look(self, asked: Asked) -> dict[SignalName, Scores]:
        """What speaks for blocks without a look at their keys, as far as the recipe asks.

        Returns:
            by signal, by block number; without those that know nothing.
        """
        scores: dict[SignalName, Scores] = {}
        weights = self.recipe.weights
        if SignalName.RECENCY in weights:
            age = np.arange(1, len(asked.candidates) + 1, dtype=np.float32)
            scores[SignalName.RECENCY] = age
        if self._texts is None:
            return scores
        if SignalName.LEXICAL in weights:
            task, said = asked.own_tokens()
            scores[SignalName.LEXICAL] = self._texts.lexical(
                [*task, *said],
                asked.candidates,
                in_other_words=self.recipe.is_asked(self._read(asked)),
            )
        if SignalName.SUCCESSION in weights:
            found = self._texts.succession(asked.line, asked.question, asked.candidates)
            if found is not None:
                scores[SignalName.SUCCESSION] = found
        return scores

    def choose(self, asked: Asked, by_signal: Mapping[SignalName, Scores]) -> Choice:
        """Choose blocks for a view, and some more that just miss a place.

        Args:
            by_signal: of the first look and of the ranks, by block number.
        """
        regions, budget_blocks = asked.regions, asked.budget_blocks
        task, said = asked.own_tokens()
        question = self._read(asked)
        competing, recipe = np.flatnonzero(asked.candidates), self.recipe.for_question(question)
        ranking = fuse(recipe, by_signal, competing, asked.in_view)
        anchors = recipe.anchors(places_for_chosen(regions, budget_blocks), question)
        hits: list[int] = []
        if anchors:
            hits = fuse(recipe.for_anchors(), by_signal, competing).hits(anchors)
        texts = self._texts
        sides = None
        if texts is not None and recipe.is_asked(question):
            sides = texts.sides([*task, *said])
        chosen = choose(
            ranking,
            recipe,
            anchors=hits,
            most=wanted_of_ranking(regions, budget_blocks),
            fixed=frozenset(regions.fixed),
            neighbours=_neighbours_in(asked.line, sides),
            newer_copy=texts.newer_copy if texts is not None else _no_copy,
        )
        return Choice(chosen, ranking.spoke)

    def _read(self, asked: Asked) -> Question:
        """How a question reads."""
        own = asked.own[len(asked.again) :]
        wanted = self._spelling is not None and asks(asked.question, own, self._spelling)
        return Question(int(own.sum()), wanted)


def _where(tokens: Sequence[int], counts: Rows) -> list[int]:
    return [token for token, counts_too in zip(tokens, counts, strict=True) if counts_too]


def _neighbours_in(
    line: Sequence[int], sides: Callable[[int], Sides] | None
) -> Callable[[int], tuple[int, ...]]:
    """`sides`: which ones of a block are wanted; both of each without it."""

    def neighbours(block: int) -> tuple[int, ...]:
        """The block behind it first: what a hit is about is said behind it more often."""
        place = place_of(block, line)
        if place is None:
            return ()
        wanted = BOTH if sides is None else sides(block)
        behind = tuple(line[place + 1 : place + 2]) if wanted.behind else ()
        return (*behind, line[place - 1]) if place and wanted.before else behind

    return neighbours


def _no_copy(block: int, among: object, /) -> None:
    """Nothing is known to repeat anything."""
