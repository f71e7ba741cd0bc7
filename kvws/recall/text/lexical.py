"""BM25 over documents that are numbered and grow: blocks, or what came before a turn."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_K1 = 1.2
_B = 0.75
_MOST_ASKED = 3.0
"""A term that a question repeats weighs the square root of how often, but no more than this."""

MOST_ENTRIES = 1 << 19
"""That are read for one question: a few milliseconds. A page of text asks for so many among some
four million tokens; among more, its commonest terms are left out, which weigh least."""

_AT_ONCE_ENTRIES = 1 << 16
"""Of a batch of terms: what is computed of them together fits the processor's cache."""

_COUNT_BITS = 8
_MOST_COUNTED = (1 << _COUNT_BITS) - 1
_ABSENT = -1


class LexicalIndex:
    """Term counts by document, searched with BM25.

    A term has one array of entries `number << 8 | count`, ascending: 4 bytes for each distinct
    term of a document. Of a block of code that is about 100 bytes, and 4 for its length; each
    term of the vocabulary takes some 200 bytes once.
    """

    def __init__(self) -> None:
        self._postings: dict[str, array[int]] = {}
        self._lengths = array("i")

    def add(self, number: int, terms: Iterable[str]) -> None:
        """Add terms to a document, which may have some already. Mutates self."""
        assert 0 <= number < 1 << (32 - _COUNT_BITS), f"document {number} has no entry"
        while number >= len(self._lengths):
            self._lengths.append(_ABSENT)
        counts = Counter(terms)
        self._lengths[number] = max(0, self._lengths[number]) + counts.total()
        for term, count in counts.items():
            postings = self._postings.get(term)
            if postings is None:
                postings = self._postings[term] = array("I")
            _count(postings, number, count)

    def scores(
        self,
        question: Sequence[str],
        candidates: npt.NDArray[np.uint8],
        rarity: Callable[[str], float] = lambda term: 1.0,
    ) -> npt.NDArray[np.float32]:
        """BM25 of a question's terms among the candidates, whose statistics alone count.

        Terms count from the rarest on, until those of `MOST_ENTRIES` entries do; the rarest does
        in any case.

        Args:
            question: terms, repeated as often as they are asked for.
            candidates: [documents], 1 where one competes.
            rarity: what a term tells besides its inverse document frequency, which is no measure
                of common words where few documents are prose.

        Returns:
            [documents] float32, 0 for those that are no candidates or have none of the terms.
        """
        scores = np.zeros(len(candidates), dtype=np.float32)
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        shared = min(len(lengths), len(candidates))
        competes = np.zeros(len(lengths), dtype=np.bool_)
        competes[:shared] = (candidates[:shared] != 0) & (lengths[:shared] != _ABSENT)
        competing, total_length = int(competes.sum()), int(lengths.sum(where=competes))
        if total_length == 0:
            return scores
        saturation = (_K1 * (1 - _B + _B * competing / total_length * lengths)).astype(np.float32)
        saturation[~competes] = np.inf  # where nothing that is counted weighs anything

        sums = np.zeros(len(lengths), dtype=np.float32)
        asked_terms = self._asked_terms(question, from_document=int(competes.argmax()))
        for batch in _batches(_rarest(asked_terms)):
            sizes = [len(term.entries) for term in batch]
            begins = np.cumsum([0, *sizes[:-1]])
            entries = np.concatenate([term.entries for term in batch])
            number = (entries >> _COUNT_BITS).astype(np.intp)  # once, not in each use as an index
            below = saturation.take(number)
            having = np.add.reduceat(np.isfinite(below), begins, dtype=np.int64)
            inverse = np.log1p((competing - having + 0.5) / (having + 0.5))
            asked = np.minimum(np.sqrt([term.asked for term in batch]), _MOST_ASKED)
            asked *= [rarity(term.text) for term in batch]
            count = (entries & _MOST_COUNTED).astype(np.float32)
            below += count
            count *= np.repeat((asked * inverse * (_K1 + 1)).astype(np.float32), sizes)
            count /= below
            np.add.at(sums, number, count)
        scores[:shared] = sums[:shared]
        return scores

    def _asked_terms(self, question: Sequence[str], *, from_document: int) -> list[_AskedTerm]:
        """The terms of a question that any document has from a certain one on."""
        first_entry = from_document << _COUNT_BITS
        terms: list[_AskedTerm] = []
        for term, asked in Counter(question).items():
            postings = self._postings.get(term)
            if postings is not None and postings[-1] >= first_entry:
                place = bisect_left(postings, first_entry)
                entries = np.frombuffer(postings, dtype=np.uint32)[place:]
                terms.append(_AskedTerm(term, asked, entries))
        return terms


class _AskedTerm(NamedTuple):
    """A term, how often a question has it, and its entries."""

    text: str
    asked: int
    entries: npt.NDArray[np.uint32]


def _rarest(terms: list[_AskedTerm]) -> list[_AskedTerm]:
    """Those that count, in their order."""
    if sum(len(term.entries) for term in terms) <= MOST_ENTRIES:
        return terms
    by_rarity = sorted(range(len(terms)), key=lambda place: len(terms[place].entries))
    read = np.cumsum([len(terms[place].entries) for place in by_rarity])
    counting = max(1, int(np.searchsorted(read, MOST_ENTRIES, side="right")))
    return [terms[place] for place in sorted(by_rarity[:counting])]


def _batches(terms: Iterable[_AskedTerm]) -> Iterator[list[_AskedTerm]]:
    """Terms in their order, together while they are small."""
    batch: list[_AskedTerm] = []
    entries = 0
    for term in terms:
        if batch and entries + len(term.entries) > _AT_ONCE_ENTRIES:
            yield batch
            batch, entries = [], 0
        batch.append(term)
        entries += len(term.entries)
    if batch:
        yield batch


def _count(postings: array[int], number: int, count: int) -> None:
    """Count a term `count` times more in a document. Mutates postings."""
    entry = number << _COUNT_BITS
    if not postings or postings[-1] < entry:
        postings.append(entry | min(count, _MOST_COUNTED))
        return
    place = bisect_left(postings, entry)
    if place < len(postings) and postings[place] >> _COUNT_BITS == number:
        had = postings[place] & _MOST_COUNTED
        postings[place] = entry | min(had + count, _MOST_COUNTED)
    else:
        postings.insert(place, entry | min(count, _MOST_COUNTED))
