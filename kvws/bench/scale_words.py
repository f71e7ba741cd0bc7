"""What an agent's session is made of, in tokens: turns of words as common as words are."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from kvws.recall.text.spelling import Spelling

_ANSWER_TOKENS, _RESULT_TOKENS = 60, 840
"""Of an assistant's message and of what its tool answers."""

_WORD = re.compile(r"[ \t]?[^\W\d_]{3,}")
_FEWEST_WORDS = 100
_SHIFT = 2.7
"""Of Mandelbrot's law: the n-th word is as common as 1 / (n + 2.7)."""


class ZipfTurns:
    """Tokens of one turn after the other: the opening, what the assistant says, and its tool.

    Words are those tokens of the vocabulary that are whole words, the most common first as the
    tokenizer numbers them.
    """

    def __init__(self, spelling: Spelling, vocabulary: int, seed: int) -> None:
        """`vocabulary`: number of token ids."""
        self._opening = list(spelling.opening)
        start = spelling.message_start
        self._message_start = [] if start is None else [start]
        self._words = whole_words(spelling.decode, vocabulary)
        weights = 1 / (np.arange(1, len(self._words) + 1) + _SHIFT)
        self._up_to = np.cumsum(weights / weights.sum())
        self._chance = np.random.default_rng(seed)

    @property
    def turn_tokens(self) -> int:
        """Tokens of each turn."""
        marks = len(self._opening) + len(self._message_start)
        return marks + _ANSWER_TOKENS + _RESULT_TOKENS

    def turn(self) -> list[int]:
        """The next turn: a task's answer that calls a tool, and the tool's result."""
        said = [*self._opening, *self.words(_ANSWER_TOKENS)]
        return [*said, *self._message_start, *self.words(_RESULT_TOKENS)]

    def words(self, count: int) -> list[int]:
        """So many words."""
        places = np.searchsorted(self._up_to, self._chance.random(count))
        last = len(self._words) - 1
        return [self._words[min(place, last)] for place in places.tolist()]


def whole_words(decode: Callable[[Sequence[int]], str], vocabulary: int) -> list[int]:
    """Token ids that are one word of letters each; any, where there are next to none."""
    found = [token for token in range(vocabulary) if _WORD.fullmatch(decode((token,)))]
    return found if len(found) >= _FEWEST_WORDS else list(range(vocabulary))
