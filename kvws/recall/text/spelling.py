"""How a model's tokenizer spells what is searched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Spelling:
    """A tokenizer, as far as retrieval needs it.

    Attributes:
        decode: the text of token ids, special tokens included, a broken character as U+FFFD.
            The text of more tokens begins with that of fewer, but for such characters.
        opening: the tokens that open an assistant's turn; () where the template has none.
        rarity: how much a lower-cased word tells, above 0 and up to 1: the less, the commoner it
            is in what people write.
    """

    decode: Callable[[Sequence[int]], str]
    opening: tuple[int, ...] = ()
    rarity: Callable[[str], float] = lambda word: 1.0

    @cached_property
    def message_start(self) -> int | None:
        """The token that every message starts with, whoever speaks: the opening's first, if it
        is a marker such as <|im_start|>. None where only the opening as a whole tells."""
        if not self.opening:
            return None
        text = self.decode(self.opening[:1]).strip()
        is_marker = len(text) > 2 and text[0] in "<[" and text[-1] in ">]"
        return self.opening[0] if is_marker else None
