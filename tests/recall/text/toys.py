"""Tokenizers small enough to see through, and a tree of blocks to read from."""

from __future__ import annotations

from collections.abc import Sequence

from kvws.blocks.key import BLOCK_TOKENS
from kvws.recall.text.index import TextIndex
from kvws.recall.text.spelling import Spelling

BLOCK = BLOCK_TOKENS

START, END = 256, 257
MARKERS = {START: b"<|im_start|>", END: b"<|im_end|>"}


def spell(text: str) -> list[int]:
    """One token a byte, and one for a marker."""
    data = text.encode()
    tokens: list[int] = []
    while data:
        marker = next((m for m, spelled in MARKERS.items() if data.startswith(spelled)), None)
        length = 1 if marker is None else len(MARKERS[marker])
        tokens.append(data[0] if marker is None else marker)
        data = data[length:]
    return tokens


def decode(tokens: Sequence[int]) -> str:
    data = b"".join(MARKERS.get(token) or bytes([token]) for token in tokens)
    return data.decode(errors="replace")


def byte_spelling(opening: str = "<|im_start|>assistant\n") -> Spelling:
    return Spelling(decode, tuple(spell(opening)))


class Words:
    """One token a word, as most tokenizers have it for common ones."""

    def __init__(self, opening: str = "<|im_start|> assistant") -> None:
        self._words: list[str] = []
        self._numbers: dict[str, int] = {}
        self.spelling = Spelling(self.decode, tuple(self(opening)))

    def __call__(self, text: str) -> list[int]:
        return [self._number(word) for word in text.split()]

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(self._words[token] for token in tokens).replace("|> ", "|>")

    def _number(self, word: str) -> int:
        if word not in self._numbers:
            self._numbers[word] = len(self._words)
            self._words.append(word)
        return self._numbers[word]


class Blocks:
    """Numbered blocks as a workspace has them: None where an allocation was taken back."""

    def __init__(self) -> None:
        self.tokens: list[tuple[int, ...] | None] = []
        self.parents: list[int | None] = []

    def extend(self, tokens: Sequence[int], behind: int | None = None) -> tuple[int, ...]:
        """Append the full blocks of tokens to the line that ends with `behind`."""
        numbers: list[int] = []
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            self.tokens.append(tuple(tokens[start : start + BLOCK]))
            self.parents.append(behind)
            behind = len(self.tokens) - 1
            numbers.append(behind)
        return tuple(numbers)

    def read_into(
        self, index: TextIndex, *, upto: int | None = None, at_most: int | None = None
    ) -> bool:
        def tokens_of(number: int) -> tuple[int, ...]:
            tokens = self.tokens[number]
            assert tokens is not None, f"block {number} is none"
            return tokens

        return index.catch_up(
            len(self.tokens) if upto is None else upto,
            lambda number: self.tokens[number] is not None,
            tokens_of,
            lambda number: self.parents[number],
            at_most=at_most,
        )


def padded(tokens: Sequence[int], fill: int, blocks: int | None = None) -> list[int]:
    """Tokens filled up to whole blocks."""
    wanted = -(-len(tokens) // BLOCK) if blocks is None else blocks
    assert len(tokens) <= wanted * BLOCK
    return [*tokens, *[fill] * (wanted * BLOCK - len(tokens))]
