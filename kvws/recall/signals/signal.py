"""What all retrieval signals have in common.

A signal makes some tensors of a block's keys, its *parts*. One block's parts, one after the other,
are its *row*; the parts of many blocks lie in *tiles*, in the order that scoring reads them in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvws.blocks.key import BLOCK_TOKENS
from kvws.blocks.table import RAW
from kvws.kernels.rotary import RotaryTable, Rotation, rotation_between

_HALF_MAX = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Part:
    """The shape of one part of a row.

    Attributes:
        dtype: of its values.
        before, after: a part of one block is [*before, *after]; of a tile [*before, blocks,
            *after].
    """

    dtype: torch.dtype
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one block."""
        return math.prod((*self.before, *self.after)) * self.dtype.itemsize


class BlockKeys:
    """K of some blocks, whatever its rotation, one layer at a time.

    Attributes:
        blocks: how many.
    """

    def __init__(
        self,
        of_layer: Callable[[int], torch.Tensor],
        first_positions: torch.Tensor,
        rotary: Sequence[RotaryTable],
    ) -> None:
        """
        Args:
            of_layer: K of a layer, [blocks, BLOCK_TOKENS, kv_heads, head_dim] float32, float16
                or bfloat16.
            first_positions: [blocks] int64: token j of block b is rotated to
                first_positions[b] + j, or not at all where that is RAW.
            rotary: the table of each layer, on the keys' device.
        """
        self.of_layer = of_layer
        self.blocks = len(first_positions)
        self._first_positions = first_positions
        self._rotary = rotary
        self._rotations: dict[tuple[int, bool], Rotation] = {}

    def to_raw(self, layer: int) -> Rotation:
        """The rotation that makes a layer's keys raw: of blocks·BLOCK_TOKENS tokens, in order."""
        return self._rotation(layer, to_offsets=False)

    def to_offsets(self, layer: int) -> Rotation:
        """The rotation that takes each token of a layer to its offset inside its block."""
        return self._rotation(layer, to_offsets=True)

    def _rotation(self, layer: int, *, to_offsets: bool) -> Rotation:
        table = self._rotary[layer]
        known = self._rotations.get((id(table), to_offsets))
        if known is None:
            known = self._make_rotation(table, to_offsets=to_offsets)
            self._rotations[id(table), to_offsets] = known
        return known

    def _make_rotation(self, table: RotaryTable, *, to_offsets: bool) -> Rotation:
        inside = torch.arange(BLOCK_TOKENS, device=self._first_positions.device)
        offsets = inside.repeat(self.blocks) if to_offsets else None
        baked = (self._first_positions.clamp(min=0).unsqueeze(1) + inside).flatten()
        rotation = rotation_between(table, baked, offsets)
        raw = (self._first_positions == RAW).repeat_interleave(BLOCK_TOKENS)
        if not bool(raw.any()):
            return rotation
        if offsets is None:
            cos, sin = torch.ones_like(rotation.cos), torch.zeros_like(rotation.sin)
        else:
            fresh = rotation_between(table, None, offsets)
            cos, sin = fresh.cos, fresh.sin
        raw = raw.unsqueeze(1)
        return Rotation(
            cos=torch.where(raw, cos, rotation.cos),
            sin=torch.where(raw, sin, rotation.sin),
            interleaved=table.interleaved,
            identity=False,
        )


@dataclass(frozen=True)
class Query:
    """The query vectors of a probe on one rank.

    Attributes:
        heads: Q [layers, tokens, query_heads, head_dim] float32, not rotated.
        first_position: position of the first token in the line that it continues.
        content_rows: [tokens] bool: the tokens that ask for something, and were not written by
            a chat template; None for all.
    """

    heads: torch.Tensor
    first_position: int
    content_rows: torch.Tensor | None = None


@dataclass(frozen=True)
class Tile:
    """The parts of a stretch of blocks.

    Attributes:
        parts: each [*before, blocks, *after].
        candidates: [blocks] bool. What the parts hold of other blocks is undefined.
        first_positions: [blocks] int64: position of each block's first token in its line.
    """

    parts: tuple[torch.Tensor, ...]
    candidates: torch.Tensor
    first_positions: torch.Tensor


class Signal(Protocol):
    """One way to find the blocks that a query needs, on one tensor-parallel rank.

    Scores of the ranks add up to the model's: each rank scores with its own heads.

    Attributes:
        name: as the user spells it.
        parts: of a row.
        row_format: what the bytes of a row depend on besides the model, as text that begins with
            the name.
    """

    name: str
    parts: tuple[Part, ...]
    row_format: str

    def rows(self, keys: BlockKeys) -> tuple[torch.Tensor, ...]:
        """Parts of blocks, each [blocks, *before, *after] of its dtype."""
        ...

    def importance(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Norm of the mean keys that a row knows: [blocks] float32.

        Args:
            parts: as `rows` makes them.
        """
        ...

    def score(self, query: Query, tiles: Sequence[Tile]) -> torch.Tensor:
        """How much a query wants each block, summed over this rank's heads.

        Args:
            tiles: all on one device, where it is computed, wherever the query lies.

        Returns:
            [blocks of all tiles, in order] float32; 0 where not a candidate.
        """
        ...


def asking_tokens(tokens: int, most: int) -> range:
    """Places of at most so many tokens of a query: evenly spread, and the last among them."""
    step = max(1, -(-tokens // most))
    return range((tokens - 1) % step, tokens, step)


def device_of(tiles: Sequence[Tile], heads: torch.Tensor) -> torch.device:
    """Where tiles lie; without any, where the query does."""
    return tiles[0].candidates.device if tiles else heads.device


def to_half(x: torch.Tensor) -> torch.Tensor:
    """float16 of finite values; those beyond its range become its largest."""
    return x.clamp(-_HALF_MAX, _HALF_MAX).to(torch.float16)


def norms(means: torch.Tensor) -> torch.Tensor:
    """[blocks, …] to the norm of each block's values, [blocks] float32."""
    flat = means.flatten(1).float()
    return torch.bmm(flat.unsqueeze(1), flat.unsqueeze(2)).flatten().sqrt()
