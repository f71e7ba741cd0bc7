"""Retrieval indexes of any size, with rows as the product's signals make them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from kvws.blocks.key import BLOCK_TOKENS
from kvws.errors import ConfigError
from kvws.kernels.rotary import RotaryTable
from kvws.models.geometry import ModelGeometry
from kvws.models.profiles import find_profile
from kvws.recall.index import TILE_BLOCKS, BlockIndex
from kvws.recall.profile import Profile
from kvws.recall.signals.build import KeyGeometry, enabled_signals
from kvws.recall.signals.enabled import EnabledSignals, raw_keys
from kvws.recall.signals.signal import to_half

_SAMPLE_BLOCKS = 256
_KEYS_AT_ONCE_BLOCKS = 32
_THETA = 10_000.0
_LOW_BITS = (0x00, 0x01, 0x10, 0x11)
"""Of one code in eight bits, or of two in four."""


def profile_of(model: Path) -> Profile:
    """The model's retrieval profile.

    Raises:
        ConfigError: it has none.
    """
    found = find_profile(model)
    if found is None:
        raise ConfigError(
            f"{model} has no retrieval profile",
            hint=f"make one with: kvws calibrate --model {model}",
        )
    return found[0]


def signals_of(names: Sequence[str], geometry: ModelGeometry, profile: Profile) -> EnabledSignals:
    """The signals of a whole model on one rank, over its own rotary table.

    Scaled encodings differ in their frequencies alone, which cost the same.
    """
    rope = geometry.rope
    theta, dims = (rope.theta, rope.rotary_dim) if rope is not None else (_THETA, 0)
    dims = dims or geometry.head_dim
    frequencies = theta ** (-torch.arange(0, dims, 2) / dims)
    angles = torch.arange(geometry.max_position).unsqueeze(1) * frequencies
    table = RotaryTable(angles.cos(), angles.sin(), interleaved=False)
    sizes = KeyGeometry(geometry.layers, geometry.kv_heads, geometry.head_dim)
    return enabled_signals(names, sizes, [table] * geometry.layers, profile)


class VariedRows:
    """Rows of as many blocks as are wanted, no two alike, without making keys for each.

    Random keys of some hundred blocks go through the real signals. Every further row is one of
    those, its numbers scaled by a factor of the block's own, its codes with other low bits.
    """

    def __init__(self, signals: EnabledSignals, geometry: ModelGeometry, seed: int) -> None:
        self._signals = signals
        self._chance = torch.Generator()
        self._chance.manual_seed(seed)
        shape = (
            geometry.layers,
            _KEYS_AT_ONCE_BLOCKS * BLOCK_TOKENS,
            geometry.kv_heads,
            geometry.head_dim,
        )
        raw = torch.full((_KEYS_AT_ONCE_BLOCKS,), -1)
        sample = [
            signals.rows(raw_keys(torch.randn(shape, generator=self._chance)), raw)
            for _ in range(_SAMPLE_BLOCKS // _KEYS_AT_ONCE_BLOCKS)
        ]
        self._sample = torch.cat(sample)

    def some(self, count: int) -> torch.Tensor:
        """[count, row_bytes] uint8."""
        which = torch.randint(len(self._sample), (count,), generator=self._chance)
        parts = self._signals.parts(self._sample[which])
        varied = [self._varied(part) for of_signal in parts for part in of_signal]
        return torch.cat(varied, dim=1)

    def _varied(self, part: torch.Tensor) -> torch.Tensor:
        """[blocks, …] of a part, as bytes [blocks, bytes]."""
        of_block = (len(part), *[1] * (part.dim() - 1))
        if part.dtype.is_floating_point:
            factor = 0.75 + 0.5 * torch.rand(of_block, generator=self._chance)
            varied = to_half(part.float() * factor).to(part.dtype)
        else:
            which = torch.randint(len(_LOW_BITS), part.shape[:-1], generator=self._chance)
            varied = part ^ torch.tensor(_LOW_BITS).to(part.dtype)[which].unsqueeze(-1)
        return varied.flatten(1).contiguous().view(torch.uint8)


def grow_index(index: BlockIndex, rows: VariedRows, begin: int, end: int) -> None:
    """Give blocks begin … end - 1 their rows. Mutates `index`."""
    for first in range(begin, end, TILE_BLOCKS):
        some = range(first, min(end, first + TILE_BLOCKS))
        index.write(some, rows.some(len(some)))


def random_queries(geometry: ModelGeometry, tokens: int, seed: int) -> torch.Tensor:
    """Q of so many tokens: [layers, tokens, query_heads, head_dim] float32."""
    chance = torch.Generator()
    chance.manual_seed(seed)
    shape = (geometry.layers, tokens, geometry.query_heads, geometry.head_dim)
    return torch.randn(shape, generator=chance)
