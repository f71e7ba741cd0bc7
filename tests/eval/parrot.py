"""A model that goes on as what it sees went on: what it can answer is exactly what is in view."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from kvws.eval.reader import KeyValues, Reader, Reading
from kvws.kernels.rotary import RotaryTable

_LAYERS, _HEADS, _HEAD_DIM = 2, 1, 8
_PREDICTED_TOKENS = 40
_LONGEST_SUFFIX_TOKENS = 8
_VOCABULARY = 1 << 16


class Parrot:
    """Looks for the longest suffix of what it reads in what it sees, the newest of equals, and
    says what followed. It sees tokens because they are the first component of its values."""

    layers, query_heads, kv_heads, head_dim = _LAYERS, _HEADS, _HEADS, _HEAD_DIM
    window_tokens = 8192

    def __init__(self) -> None:
        angles = torch.outer(torch.arange(self.window_tokens).float(), torch.tensor([1.0, 0.1]))
        angles = torch.cat([angles, 0.01 * angles], dim=1)
        self.rotary = RotaryTable(angles.cos(), angles.sin(), False)
        self._chance = torch.Generator().manual_seed(0)

    def read(
        self,
        tokens: Sequence[int],
        before: KeyValues | None = None,
        *,
        with_queries: bool = False,
    ) -> Reading:
        seen: list[int] = []
        if before is not None:
            seen = [int(token) for token in before.values[0, 0, :, 0]]
        shape = (_LAYERS, _HEADS, len(tokens), _HEAD_DIM)
        keys = torch.randn(shape, generator=self._chance)
        values = torch.zeros(shape)
        values[..., 0] = torch.tensor(list(tokens)).float()
        text = "".join(map(chr, [*seen, *tokens]))
        said = [0] * len(tokens)
        for place in range(max(0, len(tokens) - _PREDICTED_TOKENS), len(tokens)):
            said[place] = _continuation(text[: len(seen) + place + 1])
        queries = torch.randn(_LAYERS, len(tokens), _HEADS, _HEAD_DIM, generator=self._chance)
        hidden = torch.tensor(said).float().unsqueeze(1)
        return Reading(KeyValues(keys, values), queries if with_queries else None, hidden, None)

    def log_probabilities(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(len(hidden), _VOCABULARY)
        logits[torch.arange(len(hidden)), hidden[:, 0].long()] = 20.0
        return logits.log_softmax(dim=-1)


def parrot() -> Reader:
    return cast(Any, Parrot())


def _continuation(text: str) -> int:
    for length in range(min(_LONGEST_SUFFIX_TOKENS, len(text) - 1), 0, -1):
        place = text.rfind(text[-length:], 0, len(text) - 1)
        if place >= 0:
            return ord(text[place + length])
    return 0
