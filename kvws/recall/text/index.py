"""What all blocks of one workspace say, kept up to date a slice at a time.

Blocks are read once, in the order of their numbers, each behind its parent. What was read of a
block stays, even if its allocation is taken back: it is no candidate then, and if its number
comes back, so do its tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from kvws.recall.text.block_terms import block_terms
from kvws.recall.text.copies import COPIED_SHARE, TAIL_TOKENS, CopyIndex, share_held
from kvws.recall.text.lexical import LexicalIndex
from kvws.recall.text.sides import BOTH, Sides, sides_of
from kvws.recall.text.spelling import Spelling
from kvws.recall.text.succession import SuccessionIndex
from kvws.recall.text.terms import terms
from kvws.recall.text.tree import ROOT, BlockTree
from kvws.recall.text.turns import TurnIndex


class TextIndex:
    """Lexical, succession and copy signals of one workspace: about 0.6 KB a block in all, and half
    as much again where every block brings names that were never heard before."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        self._tree = BlockTree()
        self._words = LexicalIndex()
        self._turns = TurnIndex(spelling, self._tree)
        self._succession = SuccessionIndex(spelling, self._tree, self._turns)
        self._copies = CopyIndex()
        self._next = 0
        self._gaps: list[int] = []  # numbers below it that were no block when seen, ascending
        self._completed = _Completed()

    def catch_up(
        self,
        block_count: int,
        exists: Callable[[int], bool],
        tokens: Callable[[int], Sequence[int]],
        parent: Callable[[int], int | None],
        *,
        at_most: int | None = None,
    ) -> bool:
        """Read blocks that were not read yet. Mutates self.

        Args:
            block_count: numbers given out.
            exists: whether a number is a block's now.
            tokens, parent: of a block; a first one has no parent.
            at_most: blocks to read before returning.

        Returns:
            whether none is left.
        """
        left = block_count if at_most is None else at_most
        returned = [number for number in self._gaps if exists(number)]
        for number in chain(returned, range(self._next, block_count)):
            is_block = number < self._next or exists(number)
            if is_block and left == 0:
                return False
            if is_block:
                before = parent(number)
                self._read(number, ROOT if before is None else before, tokens(number))
                left -= 1
            if number < self._next:
                self._gaps.remove(number)
            else:
                self._next = number + 1
                if not is_block:
                    self._gaps.append(number)
        return True

    def _read(self, number: int, parent: int, tokens: Sequence[int]) -> None:
        self._tree.add(number, parent, tokens)
        said = block_terms(self._spelling.decode, self._tree.tokens(parent), tokens)
        self._words.add(number, said.own)
        if said.completed and self._completed.add(parent, said.completed):
            self._words.add(parent, said.beyond)
        self._copies.add(number, self._with_tail(number))
        for exchange in self._turns.add(number, parent):
            self._succession.add(exchange, number)

    def lexical(
        self,
        question: Sequence[int],
        candidates: npt.NDArray[np.uint8],
        *,
        in_other_words: bool = False,
    ) -> npt.NDArray[np.float32]:
        """How much of a question's wording is in each candidate: BM25 over code-aware terms.

        Args:
            question: token ids.
            candidates: [blocks], 1 where a block competes.
            in_other_words: it may not be put as the blocks put it: those of its words tell less
                that are common in whatever people write.

        Returns:
            [blocks] float32, 0 where a block does not compete or was not read yet.
        """
        asked = terms(self._spelling.decode(question))
        if in_other_words:
            return self._words.scores(asked, candidates, self._spelling.rarity)
        return self._words.scores(asked, candidates)

    def succession(
        self, line: Sequence[int], question: Sequence[int], candidates: npt.NDArray[np.uint8]
    ) -> npt.NDArray[np.float32] | None:
        """How much each candidate is of an earlier turn that followed an exchange like the one
        that ends with the question.

        Args:
            line: the thread's blocks.
            question: token ids behind them that are no blocks yet.
            candidates: [blocks], 1 where a block competes.

        Returns:
            [blocks] float32, 0 where a block does not compete or is in no such turn; None where
            there is no earlier turn, or the line was not read to its end yet.
        """
        if not line or line[-1] not in self._tree:
            return None
        scores = self._succession.scores(line, question, len(candidates))
        return None if scores is None else np.where(candidates != 0, scores, np.float32(0))

    def sides(self, question: Sequence[int]) -> Callable[[int], Sides]:
        """Which neighbours of a block go on with what a question asks for; both of one that was
        not read yet.

        Args:
            question: token ids, as for `lexical`.
        """
        decode, rarity = self._spelling.decode, self._spelling.rarity
        asked = frozenset(terms(decode(question)))

        def of_block(block: int) -> Sides:
            if block not in self._tree:
                return BOTH
            return sides_of(decode(self._tree.tokens(block)), asked, rarity)

        return of_block

    def newer_copy(self, block: int, among: Container[int]) -> tuple[int, ...] | None:
        """The blocks of `among` that say later what a block says, oldest first, or None."""
        copy = self._copies.newer_copy(block, among)
        if copy is None:
            return None
        share = share_held(self._with_tail(block), map(self._with_tail, copy))
        return copy if share >= COPIED_SHARE else None

    def _with_tail(self, number: int) -> list[int]:
        return self._tree.tokens_with_tail(number, TAIL_TOKENS)


class _Completed:
    """The names that blocks were told of which they have the beginning: 8 bytes a block, as most
    blocks are continued by one other."""

    def __init__(self) -> None:
        self._first = array("q")  # by block: the first name's hash, or 0
        self._others: set[tuple[int, str]] = set()

    def add(self, block: int, name: str) -> bool:
        """Whether the block is told that name for the first time. Mutates self."""
        hashed = hash(name)
        missing = block + 1 - len(self._first)
        self._first.extend([0] * missing)
        if not self._first[block]:
            self._first[block] = hashed
            return True
        if self._first[block] == hashed or (block, name) in self._others:
            return False
        self._others.add((block, name))
        return True
