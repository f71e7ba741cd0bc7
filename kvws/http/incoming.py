"""What comes in from one client: its body, and then the news that it has gone.

The two arrive on one channel, and whoever waits for one must not lose the other. So a single
task (`watch`) reads the channel from the request's beginning to its end; everyone else looks at
what it found.
"""

from __future__ import annotations

import asyncio

from starlette.types import Receive

from kvws.errors import BadRequest, BodyTooLarge
from kvws.http.security import Headers

_READ_AHEAD_BYTES = 256 << 10
_LENGTH_MAX_DIGITS = 20


class Incoming:
    """The client's side of one request.

    At most `_READ_AHEAD_BYTES` and one chunk lie here before `body` is called; a client whose
    body is larger is then left waiting, and is not watched until `body` takes it.
    """

    def __init__(
        self, receive: Receive, headers: Headers, *, max_bytes: int, stall_s: float
    ) -> None:
        """Raises:
        BadRequest: the body is compressed, or its length is no number.
        BodyTooLarge: it says itself that it is too large.
        """
        self._receive = receive
        self._max_bytes = max_bytes
        self._stall_s = stall_s
        self._buffer = bytearray()
        self._is_wanted = False
        self._is_complete = False
        self._may_go = False
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        _check_encoding(headers.get("content-encoding", "identity"))
        _check_length(headers.get("content-length", "0"), max_bytes)

    async def watch(self) -> None:
        """Read until the client has gone; does not return once it may go (`let_go`)."""
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                if self._may_go:
                    await asyncio.Event().wait()
                return
            self._buffer += message.get("body", b"")
            self._is_complete = not message.get("more_body", False)
            self._news.set()
            while len(self._buffer) > _READ_AHEAD_BYTES and not self._is_wanted:
                self._room.clear()
                await self._room.wait()
            if len(self._buffer) > self._max_bytes:
                await asyncio.Event().wait()  # `body` has refused it; nothing more is read

    async def body(self) -> bytes | bytearray:
        """The whole body; `watch` must be running.

        Raises:
            BodyTooLarge: it is larger than this server reads, whatever its header said.
            BadRequest: the client stopped sending it.
        """
        self._is_wanted = True
        self._room.set()
        while not self._is_complete:
            self._check_size()
            self._news.clear()
            try:
                async with asyncio.timeout(self._stall_s):
                    await self._news.wait()
            except TimeoutError:
                raise refused(
                    408,
                    f"no byte of the body came for {self._stall_s:g} s",
                    hint="send the request again",
                ) from None
        self._check_size()
        body, self._buffer = self._buffer, bytearray()
        return body

    def let_go(self) -> None:
        """The answer is complete: a client that leaves now breaks nothing off."""
        self._may_go = True

    def _check_size(self) -> None:
        if len(self._buffer) > self._max_bytes:
            raise _too_large(self._max_bytes)


def refused(status: int, message: str, *, hint: str) -> BadRequest:
    """A request that HTTP itself has a status for."""
    error = BadRequest(message, hint=hint)
    error.http_status = status
    return error


def _check_encoding(encoding: str) -> None:
    # Nothing that calls a local server compresses, and what isn't unpacked can't be a bomb.
    if encoding.strip().lower() not in ("", "identity"):
        raise refused(
            415,
            "compressed request bodies are not read here",
            hint="send the body without content-encoding",
        )


def _check_length(length: str, max_bytes: int) -> None:
    if not (length.isascii() and length.isdigit()):
        raise BadRequest(
            "content-length is no number of bytes", hint="leave it to the HTTP library"
        )
    if len(length) > _LENGTH_MAX_DIGITS or int(length) > max_bytes:
        raise _too_large(max_bytes)


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the body is larger than {max_bytes} bytes",
        hint="send less, or raise the server's body limit",
    )
