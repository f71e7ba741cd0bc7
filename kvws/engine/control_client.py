"""The control plane's side of the control sockets: a few connections per rank, each of which
answers in order, so that nobody waits behind another session's scores."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvws.engine import wire
from kvws.engine.turns import FairTurns
from kvws.errors import ControlError, EngineDied

SCORES, _WORKSPACES, _STEPS = "scores", "workspaces", "steps"
"""Kinds of lanes."""

_SCORING_OPERATIONS = frozenset({"score", "score_runs"})
_WORKSPACE_OPERATIONS = frozenset({"attach", "drop_workspace"})
"""They take as long as a folder is large."""

_SETTLED_OPERATIONS = frozenset(
    {"forget", "unsaved_blocks", "drop_workspace", "stats", "check_integrity"}
)
"""They come behind every step request made before them, on whatever lane, even if whoever made it
has given up."""

_STEP_LANES = 8
"""Steps are spread over so many lanes: closing one computes the index rows of its blocks."""


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

    async def settled(self) -> None:
        """Wait until the requests made so far are answered."""
        async with self._lock:
            pass

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        self._reader = self._writer = None


class Ranks:
    """All tensor-parallel ranks, asked together.

    Requests share a connection, its *lane*, where one must not overtake the other: those of one
    step, those that open and drop workspaces, and scores. Scores are one at a time anyway, since
    each would take a core from the forward pass; workspaces take turns at them.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._lanes: dict[str, list[RankClient]] = {}
        self._scoring = FairTurns()

    async def call(self, operation: str, **arguments: Any) -> list[Any]:
        """Ask every rank; answers in rank order."""
        lane = lane_of(operation, arguments)
        if lane != SCORES:
            return await self._ask(lane, operation, arguments)
        async with self._scoring.turn(arguments["workspace"]):
            return await self._ask(lane, operation, arguments)

    async def _ask(self, lane: str, operation: str, arguments: dict[str, Any]) -> list[Any]:
        if operation in _SETTLED_OPERATIONS:
            steps = [each for name, each in self._lanes.items() if name.startswith(_STEPS)]
            await asyncio.gather(*(client.settled() for clients in steps for client in clients))
        if lane not in self._lanes:
            self._lanes[lane] = [RankClient(path) for path in self._paths]
        clients = self._lanes[lane]
        return await asyncio.gather(*(client.call(operation, arguments) for client in clients))

    async def close(self) -> None:
        clients = [client for lane in self._lanes.values() for client in lane]
        await asyncio.gather(*(client.close() for client in clients))


def lane_of(operation: str, arguments: Mapping[str, Any]) -> str:
    """The lane of a request: the same for all that must be answered in order.

    Whoever leaves a step closes it although an earlier request of that step may still be on its
    way: it may not arrive behind the end. Request ids are "<step>.<attempt>".
    """
    if operation in _SCORING_OPERATIONS:
        return SCORES
    if operation in _WORKSPACE_OPERATIONS:
        return _WORKSPACES
    step: str = arguments.get("step") or arguments.get("rid", "").rpartition(".")[0]
    return f"{_STEPS} {zlib.crc32(step.encode()) % _STEP_LANES}"
