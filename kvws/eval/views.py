"""Views, and the order of blocks that each was chosen by."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from kvws.eval.arms import RANDOM, SINK_BLOCKS, SINK_WINDOW, recent_blocks_of
from kvws.eval.history import Array, History
from kvws.recall.plan import places_for_chosen
from kvws.recall.recipe import Recipe, SignalName
from kvws.recall.regions import Regions


@dataclass(frozen=True)
class View:
    """What one arm chose.

    Attributes:
        blocks: in view order.
        ranking: blocks that competed and were chosen, or just missed a place, the most deserving
            first.
    """

    blocks: tuple[int, ...]
    ranking: tuple[int, ...]


def regions_of(history: History, budget_blocks: int) -> Regions:
    """What every view of a budget holds: the first block, and the newest for a quarter of it."""
    return history.regions(SINK_BLOCKS, recent_blocks_of(budget_blocks))


def views_of(
    history: History,
    question: Sequence[int],
    scores: Mapping[SignalName, Array],
    regions: Regions,
    budget_blocks: int,
    recipes: Mapping[str, Recipe],
    seed: str,
) -> Iterator[tuple[str, View]]:
    """The view of each recipe, of the newest blocks, and of chance, with their names.

    Args:
        question: tokens behind the history.
        scores: of the ranks, among the candidates that these regions leave.
        budget_blocks: size of every view.
    """
    for name, recipe in recipes.items():
        chosen = history.choose(recipe, question, dict(scores), regions, budget_blocks)
        yield name, _view(regions, [each.block for each in chosen], budget_blocks)
    competing: list[int] = np.flatnonzero(history.candidates(regions)).tolist()
    yield SINK_WINDOW, _view(regions, competing[::-1], budget_blocks)
    random.Random(seed).shuffle(competing)  # noqa: S311 (not for secrets)
    yield RANDOM, _view(regions, competing, budget_blocks)


def assembled(regions: Regions, ranking: Sequence[int], budget_blocks: int) -> tuple[int, ...]:
    """Sink, the first blocks of a ranking as far as they fit, recent."""
    chosen = sorted(ranking[: places_for_chosen(regions, budget_blocks)])
    return (*regions.sink, *chosen, *regions.recent)


def ranked_at(ranking: Sequence[int], right: Set[int]) -> int | None:
    """The best place of one of some blocks, from 0; None if none was chosen."""
    return next((place for place, block in enumerate(ranking) if block in right), None)


def _view(regions: Regions, ranking: list[int], budget_blocks: int) -> View:
    return View(assembled(regions, ranking, budget_blocks), tuple(ranking))
