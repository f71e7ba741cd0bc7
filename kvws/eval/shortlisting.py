"""What a shortlist loses: blocks of a long session are chosen from all of them, and from few.

Everything is chosen by the product's own index, shortlist and selector, for views of 64 blocks.
The session is read in stretches, each from position 0, and of its keys only the index's rows are
kept, so that memory grows with the rows alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from kvws.blocks.key import BLOCK_TOKENS
from kvws.errors import ConfigError
from kvws.eval.reader import KeyValues, Reader
from kvws.eval.shortlisting_session import AskedKind, LongQuestion, LongSession
from kvws.eval.views import ranked_at
from kvws.recall.choice import Chosen
from kvws.recall.fusion import Scores
from kvws.recall.index import BlockIndex
from kvws.recall.profile import Profile
from kvws.recall.recipe import FUSED, SignalName
from kvws.recall.regions import Regions
from kvws.recall.selector import Asked, Selector
from kvws.recall.shortlist import shortlist
from kvws.recall.signals.build import KeyGeometry, enabled_signals
from kvws.recall.signals.enabled import raw_keys
from kvws.recall.text.spelling import Spelling
from kvws.session.ingest import window
from kvws.session.workspace import Workspace

VIEW_BLOCKS = 64
SINK_BLOCKS = 1
RECENT_BLOCKS = 16
PLACES = VIEW_BLOCKS - SINK_BLOCKS - RECENT_BLOCKS
"""Of a view, for what is chosen."""

STRETCH_TOKENS = 2048
_PROBE_BLOCKS = 16
_SIGNALS = (SignalName.ROTATED_MEAN, SignalName.CONTENT)


@dataclass(frozen=True)
class Shortlisted:
    """What was chosen from a shortlist, beside what was chosen from all blocks.

    Attributes:
        candidates: blocks on the shortlist.
        score_kept: of the fused score of the exact choice, the share whose blocks are on it.
        blocks_kept: share of the exact choice's blocks that are chosen still.
        rank: place of the fact's best block in the choice, from 0; None if it was not chosen.
        on_list: some block of the fact is on the shortlist; None where no fact is asked for.
        look_ms: CPU time of scoring runs, of the shortlist, and of scoring its blocks.
    """

    candidates: int
    score_kept: float
    blocks_kept: float
    rank: int | None
    on_list: bool | None
    look_ms: float


@dataclass(frozen=True)
class Compared:
    """One question.

    Attributes:
        kind: of it.
        candidates: blocks that compete.
        exact_rank: as `Shortlisted.rank`, chosen from all of them.
        exact_ms: CPU time of scoring all of them.
        by_share: by percent of the candidates.
    """

    kind: AskedKind
    candidates: int
    exact_rank: int | None
    exact_ms: float
    by_share: Mapping[int, Shortlisted]


def require_places(session: LongSession, shares: Sequence[int]) -> None:
    """Raises ConfigError when a shortlist would not fill a view."""
    fewest = min((q.history_blocks for q in session.questions), default=0)
    competing = fewest - SINK_BLOCKS - RECENT_BLOCKS
    if competing * min(shares) // 100 < PLACES:
        raise ConfigError(
            f"{min(shares)} % of {max(0, competing)} blocks are fewer than the {PLACES} places "
            "of a view",
            hint="raise --tokens, or the smallest of --shares",
        )


def index_session(
    reader: Reader,
    session: LongSession,
    profile: Profile,
    on_read: Callable[[int, str], None] = lambda done, what: None,
) -> BlockIndex:
    """Read a session in stretches, and keep the rows of its blocks.

    Args:
        on_read: told how many tokens are done, and the trace of the next.
    """
    geometry = KeyGeometry(reader.layers, reader.kv_heads, reader.head_dim)
    signals = enabled_signals(_SIGNALS, geometry, [reader.rotary] * reader.layers, profile)
    index = BlockIndex(signals)
    for begin in range(0, len(session.tokens), STRETCH_TOKENS):
        on_read(begin, session.source_of(begin))
        stretch = session.tokens[begin : begin + STRETCH_TOKENS]
        keys = reader.read(stretch).key_values.keys.transpose(1, 2)
        first, blocks = begin // BLOCK_TOKENS, len(stretch) // BLOCK_TOKENS
        rows = signals.rows(raw_keys(keys), torch.full((blocks,), -1))
        index.write(range(first, first + blocks), rows)
    return index


class Comparison:
    """A long session, and the choices from it."""

    def __init__(
        self, reader: Reader, session: LongSession, index: BlockIndex, spelling: Spelling
    ) -> None:
        """
        Args:
            index: rows of the session's blocks.
        """
        self._reader, self._session, self._index = reader, session, index
        workspace = Workspace("eval")
        self._line = tuple(workspace.allocate((), session.tokens))
        self._first_positions = torch.tensor(workspace.first_positions, dtype=torch.int64)
        self._selector = Selector(FUSED, spelling)
        self._selector.catch_up(workspace, len(self._line))
        self._probed: tuple[tuple[int, ...], KeyValues] | None = None

    def compared(self, shares: Sequence[int]) -> Iterator[Compared]:
        """Choose for every question from all blocks, and from shares of them.

        Args:
            shares: percent of the candidates.
        """
        for place, question in enumerate(self._session.questions):
            queries = self._probe(question)
            if place == 0:  # mean keys of runs are made once, and no part of a look
                self._index.score_runs(queries)
            yield self._compared(question, queries, shares)

    def _compared(
        self, question: LongQuestion, queries: torch.Tensor, shares: Sequence[int]
    ) -> Compared:
        asked = self._asked(question)
        known = self._selector.first_look(asked)
        begin = time.process_time()
        scores = self._scores(asked, queries)
        exact_ms = _ms_since(begin)
        exact = self._chosen(asked, known, scores)
        competing = int(asked.candidates.sum())

        by_share: dict[int, Shortlisted] = {}
        for percent in shares:
            begin = time.process_time()
            few = self._shortlisted(asked, queries, known, competing * percent // 100)
            scores = self._scores(few, queries)
            look_ms = _ms_since(begin)
            chosen = self._chosen(few, known, scores)
            by_share[percent] = shown(exact, chosen, few.candidates, question.right, look_ms)
        ranked = ranked_at([c.block for c in exact], question.right)
        return Compared(question.kind, competing, ranked, exact_ms, by_share)

    def _asked(self, question: LongQuestion) -> Asked:
        line = self._line[: question.history_blocks]
        regions = Regions.of_line(line, SINK_BLOCKS, RECENT_BLOCKS)
        return Asked(
            line=line,
            question=question.tokens,
            own=self._selector.content_rows(question.tokens),
            regions=regions,
            candidates=np.frombuffer(regions.competes(len(line)), dtype=np.uint8),
            in_view=frozenset(),
            budget_blocks=VIEW_BLOCKS,
        )

    def _probe(self, question: LongQuestion) -> torch.Tensor:
        """Raw Q of a question behind the newest blocks, [layers, tokens, query_heads, d]."""
        line = self._line[: question.history_blocks]
        probed = window(line, SINK_BLOCKS, _PROBE_BLOCKS)
        if self._probed is None or self._probed[0] != probed:
            tokens = self._session.tokens
            seen = [t for b in probed for t in tokens[b * BLOCK_TOKENS : (b + 1) * BLOCK_TOKENS]]
            self._probed = probed, self._reader.read(seen).key_values
        reading = self._reader.read(question.tokens, self._probed[1], with_queries=True)
        assert reading.queries is not None  # asked for
        return reading.queries

    def _shortlisted(
        self,
        asked: Asked,
        queries: torch.Tensor,
        known: Mapping[SignalName, Scores],
        at_most: int,
    ) -> Asked:
        of_runs = self._index.score_runs(queries, torch.tensor(asked.own.astype(bool)))
        assert of_runs is not None  # `content` is among the signals
        few = shortlist(asked.candidates, known, of_runs.numpy(), at_most)
        return replace(asked, candidates=few)

    def _scores(self, asked: Asked, queries: torch.Tensor) -> dict[SignalName, Scores]:
        found = self._index.score(
            queries,
            self._first_positions[: len(asked.candidates)],
            len(asked.line) * BLOCK_TOKENS,
            torch.tensor(asked.candidates.astype(bool)),
            torch.tensor(asked.own.astype(bool)),
        )
        return {SignalName(name): scores.numpy() for name, scores in found.items()}

    def _chosen(
        self,
        asked: Asked,
        known: Mapping[SignalName, Scores],
        scores: Mapping[SignalName, Scores],
    ) -> Sequence[Chosen]:
        return self._selector.choose(asked, {**known, **scores}).chosen[:PLACES]


def shown(
    exact: Sequence[Chosen],
    chosen: Sequence[Chosen],
    on_list: npt.NDArray[np.uint8],
    right: frozenset[int],
    look_ms: float,
) -> Shortlisted:
    """Compare the choice from all blocks with the choice from few.

    Args:
        exact: from all, at least one.
        on_list: [blocks] 1 for those on the shortlist.
        right: blocks of the fact that is asked for.
    """
    blocks = {c.block for c in chosen}
    whole = sum(c.score for c in exact)
    kept = sum(c.score for c in exact if on_list[c.block])
    return Shortlisted(
        candidates=int(on_list.sum()),
        score_kept=kept / whole,
        blocks_kept=sum(c.block in blocks for c in exact) / len(exact),
        rank=ranked_at([c.block for c in chosen], right),
        on_list=any(bool(on_list[block]) for block in right) if right else None,
        look_ms=look_ms,
    )


def _ms_since(begin: float) -> float:
    return 1000 * (time.process_time() - begin)
