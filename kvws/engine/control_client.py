"""The control plane's side of the control sockets: one connection per rank, one answer each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvws.engine import wire
from kvws.errors import ControlError, EngineDied


class RankClient:
    """A connection to one rank. Requests are answered in order; one is in flight at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = asyncio.Lock()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def call(self, operation: str, arguments: dict[str, Any]) -> Any:
        """Ask for an operation.

        A caller that is cancelled does not cancel the exchange: its answer would be taken for
        the next request's.

        Raises:
            ControlError: the rank refused it.
            EngineDied: the connection is gone.
        """
        body = await asyncio.shield(self._exchange(operation, arguments))
        reply = wire.unpack(body)
        if "error" in reply:
            raise ControlError(f"{operation}: {reply['error']}", hint=reply.get("hint", ""))
        return reply["value"]

    async def _exchange(self, operation: str, arguments: dict[str, Any]) -> bytes:
        async with self._lock:
            try:
                reader, writer = await self._connection()
                writer.write(wire.encode({"operation": operation, **arguments}))
                await writer.drain()
                header = await reader.readexactly(wire.HEADER_BYTES)
                return await reader.readexactly(wire.frame_length(header))
            except (OSError, asyncio.IncompleteReadError) as error:
                await self.close()
                raise EngineDied(
                    "the engine process is gone", hint="see its log for the reason"
                ) from error

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_unix_connection(str(self._path))
        return self._reader, self._writer

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        self._reader = self._writer = None


class Ranks:
    """All tensor-parallel ranks, asked together."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._clients = [RankClient(path) for path in paths]

    async def call(self, operation: str, **arguments: Any) -> list[Any]:
        """Ask every rank; answers in rank order."""
        return await asyncio.gather(
            *(client.call(operation, arguments) for client in self._clients)
        )

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self._clients))
