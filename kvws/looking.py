"""A look at the blocks that compete for a view: at all of them from afar, at the best closely."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvws.choosing import first_look, read_new_blocks
from kvws.engine.protocol import Engine
from kvws.recall.fusion import Scores
from kvws.recall.recipe import SignalName
from kvws.recall.regions import Regions
from kvws.recall.selector import Asked
from kvws.recall.shortlist import shortlist
from kvws.session.workspace import Workspace


def competing(
    regions: Regions,
    line: tuple[int, ...],
    question: Sequence[int],
    workspace: Workspace,
    thread: str,
) -> npt.NDArray[np.uint8]:
    """[blocks of the workspace] 1 where one competes for a thread's view.

    A question that is asked anew is answered anew: what was answered before does not compete.

    Args:
        line: the thread's blocks.
        question: tokens behind them that are no blocks yet.
    """
    recallable = np.frombuffer(workspace.recallable(thread, line), dtype=np.uint8)
    candidates = recallable & np.frombuffer(regions.competes(len(recallable)), dtype=np.uint8)
    candidates[workspace.other_answers(line, question)] = 0
    return candidates


@dataclass(frozen=True)
class Looked:
    """What the signals say.

    Attributes:
        asked: what for; its candidates are the blocks that were looked at closely.
        rows: query tokens whose Q the ranks had; without all of them the scores are of no use.
        by_signal: by block number.
    """

    asked: Asked
    rows: int
    by_signal: Mapping[SignalName, Scores]


@dataclass(frozen=True)
class Look:
    """How the blocks of a workspace are looked at for one question.

    Attributes:
        query_first: position of the first token that the probe asks with, in the thread's line.
        closely_at_most: blocks whose keys are scored one by one, if the engine has room for as
            many.
    """

    engine: Engine
    workspace: Workspace
    asked: Asked
    query_first: int
    closely_at_most: int

    async def first(self) -> dict[SignalName, Scores]:
        """What is known without the probe."""
        await read_new_blocks(self.workspace)
        return await first_look(self.workspace, self.asked)

    async def with_queries(self, rid: str, known: Mapping[SignalName, Scores]) -> Looked:
        """What the watched queries of a request add to it.

        Args:
            known: of the first look.
        """
        asked = await self._shortlisted(rid, known)
        first_positions = self.workspace.first_positions[: len(asked.candidates)]
        scores = await self.engine.score(
            rid,
            self.workspace.name,
            asked.candidates.tobytes(),
            first_positions.tobytes(),
            self.query_first,
            asked.own.tobytes(),
        )
        of_ranks = {SignalName(name): found for name, found in scores.by_signal.items()}
        return Looked(asked, scores.rows, {**known, **of_ranks})

    async def _shortlisted(self, rid: str, known: Mapping[SignalName, Scores]) -> Asked:
        """Fewer candidates, where they are too many. Without content heads nothing tells runs of
        blocks apart: then all are scored."""
        asked = self.asked
        at_most = min(self.closely_at_most, self.engine.scored_at_once_blocks or sys.maxsize)
        if int(asked.candidates.sum()) <= at_most:
            return asked
        runs = await self.engine.score_runs(rid, self.workspace.name, asked.own.tobytes())
        if runs is None:
            return asked
        few = shortlist(asked.candidates, known, runs, at_most)
        return replace(asked, candidates=few)
