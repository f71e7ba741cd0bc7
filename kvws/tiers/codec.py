"""How a block's payload lies at rest: bit for bit, or quantised.

A quantised block, layer after layer, every layer of the same size:

    | K codes | K scales | V codes | V scales |  …  | zeros up to a whole sector |

so that one layer is read without the others. K is made raw before it is quantised: channels that
a rotation has mixed share no range, and raw keys need no position beside them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, get_args

import torch

from kvws.blocks.key import BLOCK_TOKENS
from kvws.blocks.table import RAW
from kvws.errors import ConfigError
from kvws.kernels.mean_k import raw_rotation
from kvws.kernels.quant import (
    Format,
    Side,
    codes_shape,
    dequantise,
    quantise,
    scales_shape,
)
from kvws.kernels.rerope import Rotation, rotate
from kvws.kernels.rotary import RotaryTable
from kvws.store.storage import SECTOR_BYTES
from kvws.tiers.formats import EXACT, PAYLOAD_FORMATS
from kvws.tiers.geometry import PayloadGeometry

_SCRATCH_BYTES = 512 << 10
"""fp32 keys that are worked on together: small enough to stay in cache between two passes."""


class PayloadCodec(Protocol):
    """Payloads of blocks to bytes at rest and back.

    A payload is [n, 2, layers, BLOCK_TOKENS, kv_heads, head_dim] in the pool's dtype, K at 0 and
    V at 1; its bytes at rest are [n, payload_bytes] uint8. Blocks may lie apart, each one is
    contiguous. Codecs hold no state: several threads may use one at once.

    Attributes:
        format: one of PAYLOAD_FORMATS.
        payload_bytes: size of a block at rest, a multiple of SECTOR_BYTES.
        raw_keys: decoded K is not rotated. Otherwise K keeps the rotation it came with.
    """

    format: str
    payload_bytes: int
    raw_keys: bool

    def encode(
        self, payload: torch.Tensor, first_positions: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Payloads to bytes.

        Mutates: all of `out`.

        Args:
            payload: the blocks; token j of block b has its K rotated to first_positions[b] + j,
                or not at all where that is RAW.
            first_positions: [n] int64.
            out: the bytes.

        Raises:
            ValueError: a shape or a dtype isn't the geometry's, or a position is not in the
                rotary table.
        """
        ...

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Bytes to payloads.

        Mutates: all of `out`.

        Raises:
            ValueError: a shape or a dtype isn't the geometry's.
        """
        ...

    def decode_layer(self, data: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer, each [n, BLOCK_TOKENS, kv_heads, head_dim] in the pool's dtype.

        They may share memory with `data`.

        Raises:
            ValueError: a shape or a dtype isn't the geometry's.
        """
        ...


def make_codec(
    format: str, geometry: PayloadGeometry, rotary: Sequence[RotaryTable]
) -> PayloadCodec:
    """The codec of a format.

    Args:
        format: one of PAYLOAD_FORMATS.
        geometry: of the payloads.
        rotary: the table of each layer, on the payloads' device.

    Raises:
        ConfigError: no such format.
    """
    if format == EXACT:
        return _ExactCodec(geometry)
    for known in get_args(Format):
        if format == known:
            return _QuantisedCodec(known, geometry, rotary)
    raise ConfigError(
        f"unknown payload format {format!r}", hint=f"one of {', '.join(PAYLOAD_FORMATS)}"
    )


def _whole_sectors(size_bytes: int) -> int:
    return -(-size_bytes // SECTOR_BYTES) * SECTOR_BYTES


class _ExactCodec:
    """Bits as they are, in the order of the host tier."""

    def __init__(self, geometry: PayloadGeometry) -> None:
        self.format = EXACT
        self.raw_keys = False
        self.payload_bytes = _whole_sectors(geometry.block_bytes)
        self._geometry = geometry
        self._layer_bytes = geometry.block_bytes // (2 * geometry.layers)

    def encode(
        self, payload: torch.Tensor, first_positions: torch.Tensor, out: torch.Tensor
    ) -> None:
        _check_payload(self._geometry, payload, first_positions)
        _check_data(self.payload_bytes, out, len(payload))
        used = self._geometry.block_bytes
        for block, target in zip(payload, out, strict=True):
            target[:used].copy_(_bytes(block))
        out[:, used:] = 0

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        _check_payload(self._geometry, out)
        _check_data(self.payload_bytes, data, len(out))
        for source, block in zip(data, out, strict=True):
            _bytes(block).copy_(source[: self._geometry.block_bytes])

    def decode_layer(self, data: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        _check_data(self.payload_bytes, data)
        geometry = self._geometry
        shape = (BLOCK_TOKENS, geometry.kv_heads, geometry.head_dim)
        keys, values = (
            _part(data, index * self._layer_bytes, shape, geometry.dtype)
            for index in (layer, geometry.layers + layer)
        )
        return keys, values


@dataclass(frozen=True)
class _SidePlace:
    """Where K or V of a layer lies, in bytes from the layer's start."""

    side: Side
    codes_start: int
    codes_shape: tuple[int, ...]
    scales_start: int
    scales_shape: tuple[int, ...]
    end: int

    def parts(self, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of this side, views. records: [n, layer_bytes], layers of blocks."""
        return (
            _part(records, self.codes_start, self.codes_shape, torch.uint8),
            _part(records, self.scales_start, self.scales_shape, torch.int16),
        )


class _QuantisedCodec:
    """Raw K and V of each layer as codes and scales."""

    def __init__(
        self, format: Format, geometry: PayloadGeometry, rotary: Sequence[RotaryTable]
    ) -> None:
        if len(rotary) != geometry.layers:
            raise ValueError(f"expected {geometry.layers} rotary tables, got {len(rotary)}")
        self.format = format
        self.raw_keys = True
        self._format: Format = format
        self._geometry = geometry
        self._rotary = tuple(rotary)
        self._keys = _place(format, "keys", geometry, 0)
        self._values = _place(format, "values", geometry, self._keys.end)
        self._layer_bytes = self._values.end
        self.payload_bytes = _whole_sectors(geometry.layers * self._layer_bytes)
        layer_elements = BLOCK_TOKENS * geometry.kv_heads * geometry.head_dim
        self._step = max(1, _SCRATCH_BYTES // (4 * layer_elements))
        self._groups = _layer_groups(self._rotary, self._step)

    def encode(
        self, payload: torch.Tensor, first_positions: torch.Tensor, out: torch.Tensor
    ) -> None:
        _check_payload(self._geometry, payload, first_positions)
        _check_data(self.payload_bytes, out, len(payload))
        for index, (block, target) in enumerate(zip(payload, out, strict=True)):
            position = first_positions[index : index + 1]
            records = self._records(target)
            for group in self._groups:
                keys = _raw(block[0, group], position, self._rotary[group.start])
                self._write(records[group], self._keys, keys)
                self._write(records[group], self._values, block[1, group])
        out[:, self._geometry.layers * self._layer_bytes :] = 0

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        _check_payload(self._geometry, out)
        _check_data(self.payload_bytes, data, len(out))
        for source, block in zip(data, out, strict=True):
            records = self._records(source)
            for group in self._groups:
                self._read(records[group], self._keys, block[0, group])
                self._read(records[group], self._values, block[1, group])

    def decode_layer(self, data: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        _check_data(self.payload_bytes, data)
        geometry = self._geometry
        shape = (len(data), BLOCK_TOKENS, geometry.kv_heads, geometry.head_dim)
        keys, values = (
            torch.empty(shape, dtype=geometry.dtype, device=data.device) for _ in range(2)
        )
        start = layer * self._layer_bytes
        records = data[:, start : start + self._layer_bytes]
        for first in range(0, len(data), self._step):
            blocks = slice(first, first + self._step)
            self._read(records[blocks], self._keys, keys[blocks])
            self._read(records[blocks], self._values, values[blocks])
        return keys, values

    def _records(self, block: torch.Tensor) -> torch.Tensor:
        """A block's bytes by layer: [layers, layer_bytes], a view."""
        geometry = self._geometry
        used = block[: geometry.layers * self._layer_bytes]
        return used.view(geometry.layers, self._layer_bytes)

    def _write(self, records: torch.Tensor, place: _SidePlace, x: torch.Tensor) -> None:
        """Quantise x, [n, BLOCK_TOKENS, kv_heads, head_dim]. Mutates: its place in `records`."""
        codes, scales = quantise(x, self._format, place.side)
        target_codes, target_scales = place.parts(records)
        target_codes.copy_(codes)
        target_scales.copy_(scales)

    def _read(self, records: torch.Tensor, place: _SidePlace, out: torch.Tensor) -> None:
        """Mutates: all of `out`, [n, BLOCK_TOKENS, kv_heads, head_dim]."""
        dequantise(*place.parts(records), self._format, place.side, out)


def _layer_groups(rotary: Sequence[RotaryTable], step: int) -> list[slice[int, int, None]]:
    """At most `step` consecutive layers that share a rotary table, again and again."""
    groups: list[slice[int, int, None]] = []
    start = 0
    for end in range(1, len(rotary) + 1):
        if end == len(rotary) or end - start == step or rotary[end] is not rotary[start]:
            groups.append(slice(start, end))
            start = end
    return groups


def _place(format: Format, side: Side, geometry: PayloadGeometry, start: int) -> _SidePlace:
    shape = (BLOCK_TOKENS, geometry.kv_heads, geometry.head_dim)
    codes, scales = codes_shape(format, *shape), scales_shape(format, side, *shape)
    scales_start = start + math.prod(codes)
    end = scales_start + math.prod(scales) * torch.int16.itemsize
    return _SidePlace(side, start, codes, scales_start, scales, end)


def _raw(keys: torch.Tensor, position: torch.Tensor, rotary: RotaryTable) -> torch.Tensor:
    """Un-rotated keys in fp32.

    Args:
        keys: [layers, BLOCK_TOKENS, kv_heads, head_dim] of one block.
        position: [1] int64 of the block's first token, or RAW.
        rotary: the table of all these layers.
    """
    if int(position) == RAW:
        return keys.to(torch.float32)
    rotation = raw_rotation(position, BLOCK_TOKENS, rotary)
    layers = keys.shape[0]
    every_layer = Rotation(
        cos=rotation.cos.repeat(layers, 1),
        sin=rotation.sin.repeat(layers, 1),
        interleaved=rotation.interleaved,
        identity=rotation.identity,
    )
    return rotate(keys.flatten(0, 1), every_layer, out_dtype=torch.float32).view(keys.shape)


def _part(
    data: torch.Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Bytes of each block from `start` on as a tensor [n, *shape], a view."""
    used = data[:, start : start + math.prod(shape) * dtype.itemsize]
    return used.view(dtype).view(len(data), *shape)


def _bytes(block: torch.Tensor) -> torch.Tensor:
    """One contiguous block's bytes, a view."""
    return block.view(-1).view(torch.uint8)


def _check_payload(
    geometry: PayloadGeometry, payload: torch.Tensor, first_positions: torch.Tensor | None = None
) -> None:
    expected = geometry.shape
    if payload.dim() != 6 or payload.shape[1:] != expected or payload.dtype != geometry.dtype:
        raise ValueError(
            f"a payload must be [n, {', '.join(map(str, expected))}] {geometry.dtype}, "
            f"got {tuple(payload.shape)} {payload.dtype}"
        )
    if first_positions is None:
        return
    if first_positions.shape != payload.shape[:1] or first_positions.dtype != torch.int64:
        raise ValueError(
            f"first_positions must be ({len(payload)},) torch.int64, "
            f"got {tuple(first_positions.shape)} {first_positions.dtype}"
        )


def _check_data(payload_bytes: int, data: torch.Tensor, blocks: int | None = None) -> None:
    shape = (len(data) if blocks is None else blocks, payload_bytes)
    if data.shape != shape or data.dtype != torch.uint8:
        raise ValueError(
            f"bytes at rest must be {shape} torch.uint8, got {tuple(data.shape)} {data.dtype}"
        )
