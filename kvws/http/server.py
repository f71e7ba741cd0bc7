"""Serving the application on a socket, inside an event loop that is there already.

bind → accept → ready → … → stop: accept no more → let answers finish → cancel the rest
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from kvws.errors import ConfigError
from kvws.http.options import FrontOptions

_KEEP_ALIVE_S = 120
"""Longer than clients keep idle connections, so that none is closed under a new request."""

_BACKLOG = 256
_FAREWELL_S = 2.0


async def serve(
    app: FastAPI,
    options: FrontOptions,
    port: int,
    *,
    ready: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
    grace_s: int = 5,
) -> None:
    """Serve until `stop` is set or the caller is cancelled. Installs no signal handlers.

    Args:
        app: as `make_app` built it from the same options.
        port: 0 for any free one.
        ready: called with the base URL as soon as requests are answered.
        grace_s: how long running answers may go on after the stop.

    Raises:
        ConfigError: the address cannot be bound.
    """
    listener = _bind(options.host, port)
    server = _Server(_configuration(app, grace_s), _base_url(listener), ready)
    serving = asyncio.create_task(server.serve([listener]))
    stopping = asyncio.create_task((stop or asyncio.Event()).wait())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        server.should_exit = True
        await _finished(server, serving)
        listener.close()
    serving.result()


async def _finished(server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
    """Wait for the graceful end; who is cancelled while waiting has waited long enough."""
    try:
        await asyncio.wait({serving})
    except asyncio.CancelledError:
        server.force_exit = True
        for request in set(server.server_state.tasks):
            request.cancel()
        await asyncio.wait({serving})
        raise
    finally:
        if requests := set(server.server_state.tasks):  # cancelled, and saying farewell
            await asyncio.wait(requests, timeout=_FAREWELL_S)


class _Server(uvicorn.Server):
    """A server that leaves signals to the program it is part of."""

    def __init__(
        self, config: uvicorn.Config, base_url: str, ready: Callable[[str], None] | None
    ) -> None:
        super().__init__(config)
        self._base_url = base_url
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._ready is not None:
            self._ready(self._base_url)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _configuration(app: FastAPI, grace_s: int) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=grace_s,
    )


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host.strip("[]"), port), family=family, backlog=_BACKLOG)
        # Accepted connections inherit it. asyncio does not set it on them: without it a small
        # frame waits for the client's delayed acknowledgement of the last one, some 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        raise ConfigError(
            f"cannot serve on {host} port {port}: {error.strerror or error}",
            hint="another program serves there; choose another --port"
            if taken
            else "choose an address of this machine with --host, and a port above 1023",
        ) from error
    except OverflowError as error:
        raise ConfigError(f"{port} is no port", hint="choose 0 to 65535") from error


def _base_url(listener: socket.socket) -> str:
    """Where clients on this machine find the server: a wildcard address is every address."""
    host, port = listener.getsockname()[:2]
    if host == "0.0.0.0":  # noqa: S104 - looked at, not bound to
        host = "127.0.0.1"
    elif host == "::":
        host = "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
