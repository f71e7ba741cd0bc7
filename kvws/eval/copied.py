"""What a recorded turn repeats word for word of what came before it. A pure decision.

Token ids are searched as the characters of a string, which Python does fast and whole.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from kvws.blocks.key import BLOCK_TOKENS

LEAST_TOKENS = 12
"""Shorter runs are phrases and syntax, which a model does not look up."""


@dataclass(frozen=True)
class CopySpan:
    """Tokens begin … end - 1 of a turn that stand earlier as well.

    Attributes:
        sources: where each earlier copy begins, oldest first, at least one.
    """

    begin: int
    end: int
    sources: tuple[int, ...]

    def places(self, history_blocks: int) -> list[range]:
        """Of each copy, the blocks of a history that hold it. What lies behind the history is
        part of the question, and in sight whatever the view is."""
        length = self.end - self.begin
        return [
            range(
                min(source // BLOCK_TOKENS, history_blocks),
                min(-(-(source + length) // BLOCK_TOKENS), history_blocks),
            )
            for source in self.sources
        ]


@dataclass(frozen=True)
class Coverage:
    """How much of one copy, the best in view, a view holds, in blocks."""

    blocks: int
    in_view: int

    @property
    def is_whole(self) -> bool:
        return self.in_view == self.blocks


def copy_spans(
    earlier: Sequence[int], turn: Sequence[int], least_tokens: int = LEAST_TOKENS
) -> list[CopySpan]:
    """The maximal runs of a turn that occur earlier, by their beginning; they may overlap.

    A run is maximal if neither the token before it nor the one behind it can join it. Runs that
    the turn itself has said before are left out: their source is in sight.
    """
    known, said = _as_text(earlier), _as_text(turn)
    runs: list[tuple[int, int]] = []
    begin = 0
    for end in range(1, len(said) + 1):
        if said[begin:end] in known:
            continue
        runs.append((begin, end - 1))
        while begin < end and said[begin:end] not in known:
            begin += 1
    runs.append((begin, len(said)))
    return [
        CopySpan(begin, end, _occurrences(known, said[begin:end]))
        for begin, end in runs
        if end - begin >= least_tokens and said.find(said[begin:end], 0, begin) < 0
    ]


def coverage(span: CopySpan, view: Set[int], history_blocks: int) -> Coverage:
    """Of the copy that a view holds the largest share of."""
    found = [
        Coverage(len(blocks), sum(block in view for block in blocks))
        for blocks in span.places(history_blocks)
    ]
    return max(found, key=lambda each: each.in_view / each.blocks if each.blocks else 1.0)


def covered_tokens(spans: Sequence[CopySpan]) -> int:
    """Tokens that are part of any span."""
    return len({token for span in spans for token in range(span.begin, span.end)})


def _as_text(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


def _occurrences(text: str, wanted: str) -> tuple[int, ...]:
    found: list[int] = []
    place = text.find(wanted)
    while place >= 0:
        found.append(place)
        place = text.find(wanted, place + 1)
    return tuple(found)
