"""One order out of several opinions: reciprocal rank fusion of the signals. A pure decision.

Scores of different signals have nothing in common but their order, so only ranks are added:
a block that a signal ranks r-th gets weight / (k + r) from it (Cormack et al., 2009). What a
signal scores at zero or below, or far below its best where the recipe says so, it has nothing to
say for.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvws.recall.recipe import Recipe, SignalName

Scores = npt.NDArray[np.floating]
NO_RANK = -1

_RANKED_BLOCKS = 4096
"""What a signal ranks lower would get next to nothing from it, and sorting it takes time. Nor are
more put in order: behind them the newer block comes first."""


@dataclass(frozen=True)
class Ranking:
    """Candidates in the order in which they deserve a place.

    Attributes:
        blocks: [candidates] int64, best first; of equal scores the newer block first.
        scores: [candidates] float64, in the same order: what the signals give together.
        ranks: by signal [candidates] int64, in the same order: from 0, or NO_RANK.
        weights: of those signals.
        rank_offset: of the recipe.
    """

    blocks: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float64]
    ranks: Mapping[SignalName, npt.NDArray[np.int64]]
    weights: Mapping[SignalName, float]
    rank_offset: float

    @property
    def spoke(self) -> tuple[SignalName, ...]:
        """The signals that rank any block at all."""
        return tuple(s for s, ranks in self.ranks.items() if bool((ranks != NO_RANK).any()))

    def hits(self, count: int) -> list[int]:
        """The best blocks, best first, as far as a signal has something to say for them."""
        return [int(block) for block in self.blocks[:count][self.scores[:count] > 0]]

    def ranks_at(self, place: int) -> dict[SignalName, int]:
        """The ranks of the block at a place of the order, without those it does not have."""
        found = {signal: int(ranks[place]) for signal, ranks in self.ranks.items()}
        return {signal: rank for signal, rank in found.items() if rank != NO_RANK}

    def loudest(self, place: int) -> SignalName | None:
        """The signal that gives most to the block at a place."""
        ranks = self.ranks_at(place)
        given = {s: self.weights[s] / (self.rank_offset + rank) for s, rank in ranks.items()}
        return max(given, key=lambda signal: given[signal]) if given else None


def fuse(
    recipe: Recipe,
    by_signal: Mapping[SignalName, Scores],
    candidates: npt.NDArray[np.integer],
    in_view: Set[int] = frozenset(),
) -> Ranking:
    """Order the candidates.

    Args:
        by_signal: scores by block number, of the recipe's signals as far as they are there.
        candidates: [n] block numbers, ascending.
        in_view: blocks of the current view: a rival has to be clearly better (`stay_bonus`).
    """
    blocks = np.asarray(candidates, dtype=np.int64)[::-1]  # newer first, for ties
    total = np.zeros(len(blocks))
    ranks: dict[SignalName, npt.NDArray[np.int64]] = {}
    for signal, weight in recipe.weights.items():
        if signal not in by_signal:
            continue
        scores = np.asarray(by_signal[signal])[blocks]
        best = _best(scores, recipe.least_shares.get(signal, 0.0))
        ranks[signal] = np.full(len(blocks), NO_RANK, dtype=np.int64)
        ranks[signal][best] = in_order = np.arange(len(best))
        total[best] += weight / (recipe.rank_offset + in_order)
    if recipe.stay_bonus and in_view and len(blocks):
        stays = np.zeros(int(blocks[0]) + 1, dtype=np.bool_)
        stays[[block for block in in_view if block < len(stays)]] = True
        total[stays[blocks]] *= 1 + recipe.stay_bonus
    order = _order(total)
    return Ranking(
        blocks[order],
        total[order],
        {signal: of_blocks[order] for signal, of_blocks in ranks.items()},
        {signal: recipe.weights[signal] for signal in ranks},
        recipe.rank_offset,
    )


def _order(total: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """The places of all entries, the best first; behind those that are ranked, in their order."""
    best = _best(total)
    left = np.ones(len(total), dtype=np.bool_)
    left[best] = False
    return np.concatenate([best, np.flatnonzero(left)])


def _best(scores: Scores, least_share: float = 0.0) -> npt.NDArray[np.int64]:
    """The places of the highest scores above zero, best first; of equal ones the earlier first.

    Args:
        least_share: so large a part of the highest is needed.
    """
    least = least_share * scores.max(initial=0.0)
    some = np.flatnonzero((scores > 0) & (scores >= least))
    values = scores[some]
    if (beyond := len(some) - _RANKED_BLOCKS) > 0:
        cut = np.partition(values, beyond)[beyond]
        ranked = values > cut
        at_cut = np.flatnonzero(values == cut)
        ranked[at_cut[: _RANKED_BLOCKS - np.count_nonzero(ranked)]] = True
        some, values = some[ranked], values[ranked]
    return some[np.argsort(-values, kind="stable")]
