# pyright: basic
"""Frames: how every small record lies in a file, so that damage is seen and stays local.

    magic (4) | body length, u32 LE (4) | xxh3_128 (16) | body

The digest covers the frame's offset in its file, the length and the body: a frame found at
another place, or a body of another length, is no frame. It detects accidents, not somebody who
may write to the file. Pure functions; the files are elsewhere.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Any, cast

import msgpack
from xxhash import xxh3_128

from kvws.errors import StoreFormatError

_MAGIC = b"kvw\x01"
_FIND_MAGIC = re.compile(re.escape(_MAGIC))
_HEADER = struct.Struct("<4sI16s")
_PLACE = struct.Struct("<QI")
HEADER_BYTES = _HEADER.size
MAX_BODY_BYTES = 64 << 20
"""More than any record needs; a longer length is damage, refused before allocation."""


def encode_frame(body: bytes, offset: int) -> bytes:
    """One frame.

    Args:
        offset: where in its file the frame will begin; it is valid nowhere else.
    """
    assert len(body) <= MAX_BODY_BYTES, f"a record of {len(body)} bytes"
    return _HEADER.pack(_MAGIC, len(body), _digest(body, offset)) + body


@dataclass(frozen=True)
class Scan:
    """What a file of frames holds.

    Attributes:
        frames: (offset, body) of every valid frame, in file order.
        valid_bytes: end of the last valid frame; the file is cut here before it is continued.
        torn_bytes: bytes after it.
        skipped_bytes: damaged bytes before it.
    """

    frames: list[tuple[int, bytes]]
    valid_bytes: int
    torn_bytes: int
    skipped_bytes: int


def scan_frames(data: bytes | memoryview) -> Scan:
    """Find the valid frames of a file given as a whole, whatever its bytes are.

    A damaged frame costs only itself: the scan goes on at the next magic that begins a valid one.
    """
    view = memoryview(data)
    frames: list[tuple[int, bytes]] = []
    position = valid_bytes = skipped_bytes = 0
    while True:
        body = _frame_at(view, position)
        if body is not None:
            skipped_bytes += position - valid_bytes
            frames.append((position, body))
            position = valid_bytes = position + HEADER_BYTES + len(body)
            continue
        candidate = _FIND_MAGIC.search(view, position + 1)
        if candidate is None:
            break
        position = candidate.start()
    return Scan(frames, valid_bytes, len(view) - valid_bytes, skipped_bytes)


def pack(message: Any) -> bytes:
    """A message of plain values as msgpack."""
    return cast("bytes", msgpack.packb(message))


def unpack(body: bytes) -> Any:
    """The message that `pack` was given; lists come back for tuples.

    Raises:
        StoreFormatError: the bytes are no single msgpack document of plain values.
    """
    limit = len(body)
    try:
        return msgpack.unpackb(
            body,
            strict_map_key=False,
            max_str_len=limit,
            max_bin_len=limit,
            max_array_len=limit,
            max_map_len=limit,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise StoreFormatError(f"a record is not msgpack: {error}") from error


def _frame_at(view: memoryview, offset: int) -> bytes | None:
    """Body of the frame that begins at `offset`, if a valid one does."""
    if len(view) - offset < HEADER_BYTES:
        return None
    magic, length, digest = _HEADER.unpack_from(view, offset)
    begin = offset + HEADER_BYTES
    if magic != _MAGIC or length > min(MAX_BODY_BYTES, len(view) - begin):
        return None
    body = view[begin : begin + length]
    return bytes(body) if _digest(body, offset) == digest else None


def _digest(body: bytes | memoryview, offset: int) -> bytes:
    state = xxh3_128(_PLACE.pack(offset, len(body)))
    state.update(body)
    return state.digest()
