"""Which blocks are worth a close look when there are too many for one. A pure decision.

A close look reads every token key of a block. Who may be worth it is told from what costs next to
nothing: how new a block is, what it says, and how much a query wants the run of blocks that it
stands in.

```
candidates of a long session
| … runs of blocks, the most wanted first … | in words | what followed before | newest |
|<--------------- half ------------------->|<-- 1/4 ->|<------ 1/8 --------->|<- 1/8 >|
```
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvws.recall.fusion import Scores
from kvws.recall.recipe import SignalName

RUN_BLOCKS = 16
"""Consecutive block numbers that are looked at together."""

_SHARES = {SignalName.LEXICAL: 4, SignalName.SUCCESSION: 8, SignalName.RECENCY: 8}
"""One part in so many of the places goes to what a signal ranks highest."""


def shortlist(
    candidates: npt.NDArray[np.uint8],
    at_first_look: Mapping[SignalName, Scores],
    of_runs: Scores,
    at_most: int,
) -> npt.NDArray[np.uint8]:
    """The candidates to look at closely.

    What a signal does not use of its share goes to the runs. A run is taken whole, or as far as
    there are places.

    Args:
        candidates: [blocks] 1 where a block competes.
        at_first_look: by signal, [blocks] scores that are there already.
        of_runs: [runs] scores of RUN_BLOCKS blocks each, the last run may be shorter; blocks of
            runs without a score come last.
        at_most: places.

    Returns:
        [blocks] 1 for at most so many of the candidates; all of them if they are no more.
    """
    competing = np.flatnonzero(candidates)
    if len(competing) <= at_most:
        return candidates
    kept = np.zeros(len(candidates), dtype=np.uint8)
    for signal, one_in in _SHARES.items():
        if signal in at_first_look:
            scores = at_first_look[signal][competing]
            kept[competing[_highest(scores, at_most // one_in)]] = 1
    left = (candidates != 0) & (kept == 0)
    in_order = _blocks_of_runs(of_runs, len(candidates))
    kept[in_order[left[in_order]][: at_most - np.count_nonzero(kept)]] = 1
    return kept


def _blocks_of_runs(of_runs: Scores, blocks: int) -> npt.NDArray[np.int64]:
    """All block numbers: of the most wanted run first, of each the older block first."""
    wanted = np.full(-(-blocks // RUN_BLOCKS), -np.inf)
    wanted[: len(of_runs)] = of_runs[: len(wanted)]
    firsts = RUN_BLOCKS * np.argsort(-wanted, kind="stable")
    numbers = (firsts[:, None] + np.arange(RUN_BLOCKS)).ravel()
    return numbers[numbers < blocks]


def _highest(scores: Scores, count: int) -> npt.NDArray[np.int64]:
    """The places of the highest scores above zero; of equal ones the newer."""
    some = np.flatnonzero(scores > 0)
    if len(some) <= count:
        return some
    if count == 0:
        return some[:0]
    cut = np.partition(scores[some], len(some) - count)[len(some) - count]
    above = some[scores[some] > cut]
    at_cut = some[scores[some] == cut]
    return np.concatenate([above, at_cut[len(at_cut) - (count - len(above)) :]])
