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
        user_opening: those that open a user's message; () where none are known.
        rarity: how much a lower-cased word tells, above 0 and up to 1: the less, the commoner it
            is in what people write.
    """

    decode: Callable[[Sequence[int]], str]
    opening: tuple[int, ...] = ()
    rarity: Callable[[str], float] = lambda word: 1.0
    user_opening: tuple[int, ...] = ()

    @cached_property
    def message_start(self) -> int | None:
        """The token that every message starts with, whoever speaks: the opening's first, if it
        is a marker such as <|im_start|>. None where only the opening as a whole tells."""
        if not self.opening:
            return None
        first = self.opening[0]
        return first if is_marker(self.decode([first])) else None


def is_marker(text: str) -> bool:
    """Whether a token is written like <|im_end|>, </s> or [INST]."""
    text = text.strip()
    return len(text) > 2 and (text[0], text[-1]) in (("<", ">"), ("[", "]"))
