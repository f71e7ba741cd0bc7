# pyright: basic
"""Framing of the control socket: a 4-byte little-endian length, then one msgpack document."""

from __future__ import annotations

import socket
import struct
from typing import Any, cast

import msgpack

from kvws.errors import ControlError

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 256 << 20
"""More than any message needs; a longer one is a broken stream, refused before allocation."""


def pack(message: Any) -> bytes:
    """A message as msgpack."""
    return cast("bytes", msgpack.packb(message))


def unpack(body: bytes) -> Any:
    """The message that `pack` was given; lists come back for tuples."""
    return msgpack.unpackb(body, strict_map_key=False)


def encode(message: Any) -> bytes:
    """One frame, length included."""
    body = pack(message)
    return _LENGTH.pack(len(body)) + body


def frame_length(header: bytes) -> int:
    """Length of the body that follows a 4-byte header.

    Raises:
        ControlError: the length is beyond MAX_FRAME_BYTES.
    """
    (length,) = _LENGTH.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise ControlError(f"a control frame claims {length} bytes")
    return length


HEADER_BYTES = _LENGTH.size


def receive(connection: socket.socket) -> Any | None:
    """Read one message from a blocking socket; None when the stream ends, even within one.

    Raises:
        ControlError, ValueError: what arrives is no message.
    """
    header = _receive_exactly(connection, HEADER_BYTES)
    if header is None:
        return None
    body = _receive_exactly(connection, frame_length(header))
    return None if body is None else unpack(body)


def _receive_exactly(connection: socket.socket, count: int) -> bytes | None:
    received = bytearray()
    while len(received) < count:
        part = connection.recv(min(count - len(received), 1 << 20))
        if not part:
            return None
        received += part
    return bytes(received)
