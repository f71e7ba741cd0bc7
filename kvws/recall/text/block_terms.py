"""The terms of a block. A name that a border cuts counts whole for the blocks on both sides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvws.recall.text.terms import names, terms_of_name

SEAM_TOKENS = 8
"""So much of the block before is read with a block, to find the beginning of a cut name."""

_BROKEN = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class BlockTerms:
    """What a block says, and what it tells about the end of the block before.

    Attributes:
        own: terms of the block, a name that began in the block before whole.
        completed: that name; "" if no name crosses the border.
        beyond: terms of that name which its beginning alone has not: the block before has them
            too, if it is this block that follows.
    """

    own: list[str]
    completed: str = ""
    beyond: tuple[str, ...] = ()


def block_terms(
    decode: Callable[[Sequence[int]], str], before: Sequence[int], tokens: Sequence[int]
) -> BlockTerms:
    """The terms of a block's tokens.

    The name at its end may be cut; what it is in full, the block that follows tells.

    Args:
        decode: as in `Spelling`.
        before: tokens of the block before; of a longer name than their last eight, less is known.
    """
    tail = list(before[-SEAM_TOKENS:])
    text = decode([*tail, *tokens])
    # A character that the border cuts belongs to the block that ends it.
    border = len(decode(tail).rstrip(_BROKEN)) if tail else 0
    own: list[str] = []
    completed, beyond = "", ()
    for begin, end in names(text):
        if end <= border:
            continue
        found = terms_of_name(text[begin:end])
        own += found
        if begin < border:
            completed = text[begin:end]
            had = terms_of_name(text[begin:border])
            beyond = tuple((Counter(found) - Counter(had)).elements())
    return BlockTerms(own, completed, beyond)
