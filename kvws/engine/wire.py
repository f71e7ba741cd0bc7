"""Framing of the control socket: a 4-byte little-endian length, then one msgpack document."""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgpack

from kvws.errors import ControlError

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 256 << 20
"""More than any message needs; a longer one is a broken stream, refused before allocation."""


def encode(message: Any) -> bytes:
    """One frame, length included."""
    body: bytes = msgpack.packb(message)
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


def decode(body: bytes) -> Any:
    """The message of a frame's body."""
    return msgpack.unpackb(body, strict_map_key=False)


HEADER_BYTES = _LENGTH.size


def receive(connection: socket.socket) -> Any | None:
    """Read one message from a blocking socket; None at a clean end of stream."""
    header = _receive_exactly(connection, HEADER_BYTES)
    if header is None:
        return None
    body = _receive_exactly(connection, frame_length(header))
    return None if body is None else decode(body)


def _receive_exactly(connection: socket.socket, count: int) -> bytes | None:
    received = bytearray()
    while len(received) < count:
        part = connection.recv(min(count - len(received), 1 << 20))
        if not part:
            return None
        received += part
    return bytes(received)
