"""The assistant's earlier turns, scored by how alike what came before them is to what comes
before the coming turn: an agent does again what it did in such a place, in the same form."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvws.recall.text.lexical import LexicalIndex
from kvws.recall.text.spelling import Spelling
from kvws.recall.text.terms import terms
from kvws.recall.text.tree import BlockTree
from kvws.recall.text.turns import Exchange, TurnIndex

_END_TOKENS = 384
"""Read of a context at either end. What matters of a long result is how it begins and ends."""

_NEWNESS = 0.5
"""The newest turn is ahead of the oldest by half of what the most alike context is worth."""

_PER_BLOCK = 1e-4
"""Blocks of a turn stand in its order: how it begins matters most."""

NEWEST_TURNS = 2048
"""Of a line, that compete: some two million tokens of work. What an agent does again, it did not
long ago; and to weigh all turns would take the longer the longer a session is."""


class SuccessionIndex:
    """What came before the turns of a workspace. A turn keeps 4 bytes for each distinct term of
    its context, of which at most 768 tokens are read: about 1 KB, once and for all."""

    def __init__(self, spelling: Spelling, tree: BlockTree, turns: TurnIndex) -> None:
        self._spelling = spelling
        self._tree = tree
        self._turns = turns
        self._contexts = LexicalIndex()

    def add(self, exchange: Exchange, head: int) -> None:
        """Read the context of a turn that opens in block `head`. Mutates self."""
        said = self._terms(head, exchange.context_begin, exchange.begin, ())
        self._contexts.add(exchange.turn, said)

    def scores(
        self, line: Sequence[int], question: Sequence[int], blocks: int
    ) -> npt.NDArray[np.float32] | None:
        """Scores of the blocks of a line's newest earlier turns.

        Args:
            line: blocks, not empty, all of them read.
            question: tokens behind the line that are no blocks yet.
            blocks: of the workspace.

        Returns:
            [blocks] float32 by block number, 0 elsewhere; None where there is no earlier turn.
        """
        coming = self._turns.coming(line[-1], question, NEWEST_TURNS)
        if coming is None or not coming.earlier:
            return None
        asked = self._terms(line[-1], coming.context_begin, coming.context_end, question)
        of_line = np.zeros(self._turns.turns, dtype=np.uint8)
        numbers = [exchange.turn for exchange in coming.earlier]
        of_line[numbers] = 1
        alike = self._contexts.scores(asked, of_line)[numbers]
        return succession_scores(line, coming.earlier, alike, blocks)

    def _terms(self, head: int, begin: int, end: int, question: Sequence[int]) -> list[str]:
        """Terms of tokens begin … end - 1 of a line and a question: the first and the last."""
        line_tokens = self._tree.line_tokens(head)

        def read(begin: int, end: int) -> list[str]:
            behind = question[max(0, begin - line_tokens) : max(0, end - line_tokens)]
            said = [*self._tree.stretch(head, begin, end), *behind]
            return terms(self._spelling.decode(said))

        if end - begin <= 2 * _END_TOKENS:
            return read(begin, end)
        return read(begin, begin + _END_TOKENS) + read(end - _END_TOKENS, end)


def succession_scores(
    line: Sequence[int],
    earlier: Sequence[Exchange],
    alike: npt.NDArray[np.float32],
    blocks: int,
) -> npt.NDArray[np.float32]:
    """Likeness relative to the most alike context, plus newness, given to every block of a turn.

    Args:
        line: block numbers.
        earlier: exchanges of the line, oldest first, at least one.
        alike: [exchanges] BM25 of each one's context against the present one.
        blocks: of the workspace.

    Returns:
        [blocks] float32 by block number. A block of two turns has the higher score.
    """
    order = np.arange(1, len(earlier) + 1, dtype=np.float32)
    of_turns = alike / max(float(alike.max()), 1e-9) + _NEWNESS * order / len(earlier)
    spans = [exchange.places for exchange in earlier]
    begins = np.array([span.start for span in spans], dtype=np.int64)
    sizes = np.array([len(span) for span in spans], dtype=np.int64)
    within = np.arange(sizes.sum(), dtype=np.int64) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    places: list[int] = (np.repeat(begins, sizes) + within).tolist()
    scores = np.zeros(blocks, dtype=np.float32)
    np.maximum.at(
        scores,
        [line[place] for place in places],  # a line is far longer than what it has of turns
        np.repeat(of_turns, sizes) - within.astype(np.float32) * _PER_BLOCK,
    )
    return scores
