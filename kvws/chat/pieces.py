"""Text as token ids, piece by piece.

Text is split at the tokenizer's hard tokens: added tokens like `<|im_start|>` that no other token
crosses and that take no neighbouring blanks with them. Pieces are used only where they give what
whole texts give; probes decide that, for good.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property

_REMEMBERED_MAX_CHARS = 64 << 20
_PROBES = ("\nWord", " word", "word ", "\n\n", "  two", "x")

Encode = Callable[[list[str]], list[list[int]]]
"""Maps whole texts to token ids, adding no special tokens."""


class PieceTokenizer:
    """Token ids of texts, and of parts of texts."""

    def __init__(self, encode: Encode, hard_tokens: Sequence[str]) -> None:
        self._encode = encode
        self._hard_tokens = tuple(hard_tokens)
        longest_first = sorted(hard_tokens, key=len, reverse=True)
        self._hard = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        self._remembered: dict[str, tuple[int, ...]] = {}
        self._remembered_chars = 0
        self._whole_only: bool | None = None if hard_tokens else True

    def __call__(self, text: str) -> list[int]:
        """Token ids of a whole text; its pieces are remembered."""
        if self._pieces_agree(text):
            return self._by_remembered_piece(text)
        return self.unremembered(text)

    def unremembered(self, text: str) -> list[int]:
        """Token ids of a whole text; nothing is remembered."""
        return self._encode([text])[0]

    def parts(self, texts: Sequence[str], behind: str) -> list[tuple[int, ...]] | None:
        """Token ids of consecutive parts of one text, each on its own; nothing is remembered.

        Args:
            texts: the parts; an empty one has no ids.
            behind: what stands before the first part; "" if that begins the text.

        Returns:
            Ids that, put together, are those of the whole text. None where a part ends inside a
            token or might, or where this tokenizer does not work part by part.
        """
        ids: list[tuple[int, ...]] = []
        for text in texts:
            if text and behind and not self._separated(behind, text):
                return None
            encoded = self._part(text, begins=not behind) if text else []
            if encoded is None:
                return None
            ids.append(tuple(encoded))
            behind = text or behind
        return ids

    def _separated(self, behind: str, text: str) -> bool:
        return bool(self._hard_tokens) and (
            behind.endswith(self._hard_tokens) or text.startswith(self._hard_tokens)
        )

    def _part(self, text: str, *, begins: bool) -> list[int] | None:
        if self._pieces_agree(text):
            pieces = [piece for piece in self._hard.split(text) if piece]
            return [id_ for ids in self._encode(pieces) for id_ in ids]
        if begins:
            return self._encode([text])[0]
        return self._behind_a_hard_token(text) if self._parts_agree else None

    def _behind_a_hard_token(self, text: str) -> list[int]:
        """What `text` is where it does not begin a text."""
        anchor = self._hard_tokens[0]
        alone, together = self._encode([anchor, anchor + text])
        return together[len(alone) :]

    @cached_property
    def _parts_agree(self) -> bool:
        """Whether texts may be cut beside hard tokens, where they may not be cut into pieces."""
        if not self._hard_tokens:
            return False
        hard = self._hard_tokens[-1]
        for probe in _PROBES:
            for head, tail in ((f"{hard}a{hard}", probe), (f"{hard}{probe}", f"{hard}b")):
                whole, first = self._encode([head + tail, head])
                if first + self._behind_a_hard_token(tail) != whole:
                    return False
        return True

    def _pieces_agree(self, text: str) -> bool:
        if self._whole_only is None:
            texts = [text, *self._probes()]
            whole = self._encode(texts)
            self._whole_only = [self._by_remembered_piece(each) for each in texts] != whole
        return not self._whole_only

    def _probes(self) -> list[str]:
        return [token + probe + token for token in self._hard_tokens for probe in _PROBES]

    def _by_remembered_piece(self, text: str) -> list[int]:
        pieces = [piece for piece in self._hard.split(text) if piece]
        self._remember(pieces)
        ids: list[int] = []
        for piece in pieces:
            ids += self._remembered[piece]
        return ids

    def _remember(self, pieces: list[str]) -> None:
        """Add what is missing; forget everything first when there is too much. Mutates self."""
        if self._remembered_chars > _REMEMBERED_MAX_CHARS:
            self._remembered.clear()
            self._remembered_chars = 0
        missing = list(dict.fromkeys(p for p in pieces if p not in self._remembered))
        if missing:
            self._remembered_chars += sum(map(len, missing))
            self._remembered.update(zip(missing, map(tuple, self._encode(missing)), strict=True))
