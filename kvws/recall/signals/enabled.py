"""The signals that are enabled on a rank, together: a block's whole row."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence

import torch

from kvws.blocks.key import BLOCK_TOKENS
from kvws.kernels.rotary import RotaryTable
from kvws.recall.signals.signal import BlockKeys, Part, Signal

ROW_FORMAT_MAX_BYTES = 120

_EMPTY_ROW_BYTES = 2
"""A row is never empty: without a signal it is so many zeros."""

_BLOCKS_AT_ONCE = 32
"""Blocks that rows are made of at a time: a few MB of keys of one layer, for any model."""


class EnabledSignals:
    """Makes rows of keys, and takes rows apart. Holds no blocks.

    A row is the parts of all signals, in their order, as bytes.

    Attributes:
        signals: in a fixed order.
        row_bytes: of one block.
        row_format: what the bytes of a row depend on besides the model; at most
            ROW_FORMAT_MAX_BYTES of text.
    """

    def __init__(self, signals: Sequence[Signal], rotary: Sequence[RotaryTable]) -> None:
        """`rotary`: the table of every layer, on the CPU."""
        self.signals = tuple(signals)
        self._rotary = rotary
        parts = [part for signal in signals for part in signal.parts]
        self.row_bytes = max(sum(part.row_bytes for part in parts), _EMPTY_ROW_BYTES)
        self.row_format = _row_format([signal.row_format for signal in signals])

    def rows(
        self, of_layer: Callable[[int, slice], torch.Tensor], first_positions: torch.Tensor
    ) -> torch.Tensor:
        """Rows of blocks, a few blocks at a time.

        Args:
            of_layer: K of a layer for a stretch of the blocks, [blocks, BLOCK_TOKENS, kv_heads,
                head_dim] float32, float16 or bfloat16.
            first_positions: [blocks] int64, as in `BlockKeys`.

        Returns:
            [blocks, row_bytes] uint8.
        """
        count = len(first_positions)
        rows = torch.zeros((count, self.row_bytes), dtype=torch.uint8)
        for start in range(0, count, _BLOCKS_AT_ONCE):
            some = slice(start, min(start + _BLOCKS_AT_ONCE, count))
            keys = BlockKeys(
                lambda layer, some=some: of_layer(layer, some), first_positions[some], self._rotary
            )
            begin = 0
            for signal in self.signals:
                for part in signal.rows(keys):
                    as_bytes = part.flatten(1).contiguous().view(torch.uint8)
                    rows[some, begin : begin + as_bytes.shape[1]] = as_bytes
                    begin += as_bytes.shape[1]
        return rows

    def parts(self, rows: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """Each signal's parts of rows, each [blocks, *before, *after].

        Args:
            rows: [blocks, row_bytes] uint8.
        """
        slices = self._slices()
        return [
            tuple(_part_of(rows, next(slices), part) for part in signal.parts)
            for signal in self.signals
        ]

    def _slices(self) -> Iterator[slice]:
        begin = 0
        for part in (part for signal in self.signals for part in signal.parts):
            yield slice(begin, begin + part.row_bytes)
            begin += part.row_bytes

    def importance(self, rows: torch.Tensor) -> list[float]:
        """How much each block is worth when two are wanted equally: the norm of the mean keys
        that its row knows, of the first signal."""
        if not self.signals:
            return [1.0] * len(rows)
        return [float(norm) for norm in self.signals[0].importance(self.parts(rows)[0])]


def raw_keys(keys: torch.Tensor) -> Callable[[int, slice], torch.Tensor]:
    """Whole keys as `EnabledSignals.rows` takes them.

    Args:
        keys: [layers, tokens, kv_heads, head_dim]; what is left of the last block is left out.
    """
    layers, tokens, *shape = keys.shape
    blocks = tokens // BLOCK_TOKENS
    whole = keys[:, : blocks * BLOCK_TOKENS]
    by_block = whole.reshape(layers, blocks, BLOCK_TOKENS, *shape)
    return lambda layer, some: by_block[layer, some]


def _part_of(rows: torch.Tensor, of_row: slice, part: Part) -> torch.Tensor:
    # A copy: the bytes in the row need not begin where the dtype may.
    values = torch.empty((len(rows), *part.before, *part.after), dtype=part.dtype)
    values.flatten(1).view(torch.uint8).copy_(rows[:, of_row])
    return values


def _row_format(formats: Sequence[str]) -> str:
    text = " ".join(formats) or "none"
    if len(text) <= ROW_FORMAT_MAX_BYTES:
        return text
    room = ROW_FORMAT_MAX_BYTES // len(formats) - 1
    return " ".join(_digested(format, room) for format in formats)


def _digested(format: str, room: int) -> str:
    """The text if there is room, or its beginning and a digest."""
    if len(format) <= room:
        return format
    digest = hashlib.blake2b(format.encode(), digest_size=8).hexdigest()
    return f"{format[: room - len(digest) - 1]}#{digest}"
