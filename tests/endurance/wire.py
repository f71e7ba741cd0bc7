"""A client down to its bytes: it can read slowly, leave in the middle, or send only half."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_PIECE_BYTES = 512


@dataclass(frozen=True)
class Manner:
    """How a client behaves.

    Attributes:
        sends: part of its body that it sends before it leaves.
        reads_bytes: it leaves after so many of the answer's bytes; None: it stays.
        pause_s: between two pieces that it reads.
    """

    sends: float = 1.0
    reads_bytes: int | None = None
    pause_s: float = 0.0


STAYS = Manner()


@dataclass(frozen=True)
class Reply:
    """Status 0: the client left before it knew."""

    status: int
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[tuple[str | None, Any]]:
        """(name, data) of server-sent events; data is text where it is no JSON."""
        found: list[tuple[str | None, Any]] = []
        for block in filter(None, self.body.decode().split("\n\n")):
            fields = dict(line.split(": ", 1) for line in block.split("\n"))
            data = fields["data"]
            found.append((fields.get("event"), json.loads(data) if data[0] == "{" else data))
        return found


async def exchange(
    port: int,
    path: str,
    headers: Mapping[str, str],
    body: bytes | None,
    manner: Manner = STAYS,
) -> Reply:
    """One request on a connection of its own; a GET without a body."""
    head = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", "host: 127.0.0.1"]
    head += ["connection: close", *(f"{name}: {value}" for name, value in headers.items())]
    if body is not None:
        head.append(f"content-length: {len(body)}")
    plug = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    plug.setblocking(False)
    if manner.pause_s:
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    try:
        await asyncio.get_running_loop().sock_connect(plug, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=plug, limit=2 * _PIECE_BYTES)
    except BaseException:
        plug.close()
        raise
    try:
        sent = (body or b"")[: int(len(body or b"") * manner.sends)]
        writer.write("\r\n".join([*head, "", ""]).encode() + sent)
        await writer.drain()
        if manner.sends < 1:
            return Reply(0, b"")
        return _reply(await _read(reader, manner), is_whole=manner.reads_bytes is None)
    finally:
        writer.transport.abort() if manner.reads_bytes is not None else writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _read(reader: asyncio.StreamReader, manner: Manner) -> bytes:
    data = bytearray()
    while manner.reads_bytes is None or len(data) < manner.reads_bytes:
        piece = await reader.read(_PIECE_BYTES)
        if not piece:
            break
        data += piece
        if manner.pause_s:
            await asyncio.sleep(manner.pause_s)
    return bytes(data)


def _reply(data: bytes, *, is_whole: bool) -> Reply:
    head, _, body = data.partition(b"\r\n\r\n")
    if not head:
        return Reply(0, b"")
    if is_whole and b"transfer-encoding: chunked" in head.lower():
        body = _unchunked(body)
    return Reply(int(head.split(b" ", 2)[1]), body)


def _unchunked(data: bytes) -> bytes:
    body, rest = bytearray(), data
    while True:
        size_text, _, rest = rest.partition(b"\r\n")
        size = int(size_text, 16)  # an answer that was cut has no last chunk, and fails here
        if not size:
            return bytes(body)
        body += rest[:size]
        rest = rest[size + 2 :]
