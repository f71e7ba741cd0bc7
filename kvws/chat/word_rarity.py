"""How rare a word is in what people write, as far as a tokenizer tells.

Vocabularies are in the order in which their entries proved useful: what is one entry is a common
word, the commoner the lower its number. By Zipf's law what a word tells grows with the logarithm
of that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

LEAST = 0.05
"""Of the commonest words: next to nothing, but more than of none."""

_FIRST_WORDS = 300
"""Entries before it are bytes and markers, and the words that are everywhere."""

_REMEMBERED_WORDS = 1 << 14


class WordRarity:
    """From LEAST, for a word like "the", to 1, for one that the vocabulary does not have."""

    def __init__(self, pieces: Callable[[str], Sequence[int]], vocabulary: int) -> None:
        """
        Args:
            pieces: tokens of a text, no markers added.
            vocabulary: how many entries it has.
        """
        self._pieces = pieces
        self._range = math.log(max(vocabulary, _FIRST_WORDS + 1) / _FIRST_WORDS)
        self._known = lru_cache(_REMEMBERED_WORDS)(self._rarity)

    def __call__(self, word: str) -> float:
        return self._known(word)

    def _rarity(self, word: str) -> float:
        # Most tokenizers spell a word with the blank before it; some put one there themselves.
        for text in (f" {word}", word):
            tokens = self._pieces(text)
            if len(tokens) == 1:
                rank = max(tokens[0], _FIRST_WORDS)
                return min(1.0, max(LEAST, math.log(rank / _FIRST_WORDS) / self._range))
        return 1.0
