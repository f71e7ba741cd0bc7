"""The data plane's side of the control socket: a Unix socket in a directory of mode 0700."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from pathlib import Path
from typing import Any, Protocol

from kvws.engine import wire
from kvws.errors import KvwsError

logger = logging.getLogger(__name__)


class Handler(Protocol):
    """Answers one request. Raising becomes an error reply, never a broken connection."""

    def handle(self, operation: str, arguments: dict[str, Any]) -> Any: ...


class ControlServer:
    """Accepts connections on a thread and answers each on a thread of its own."""

    def __init__(self, path: Path, handler: Handler) -> None:
        self._path = path
        self._handler = handler
        self._listener = socket.socket(socket.AF_UNIX)

    def start(self) -> None:
        """Bind and begin to accept. The socket file appears only when it can be used."""
        self._listener.bind(str(self._path))
        self._listener.listen()
        threading.Thread(target=self._accept, name="kvws-control", daemon=True).start()

    def stop(self) -> None:
        """Stop accepting; open connections end with their peers."""
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed by stop()
                return
            threading.Thread(
                target=self._serve, args=(connection,), name="kvws-control-peer", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while (request := wire.receive(connection)) is not None:
                connection.sendall(wire.encode(self._answer(request)))

    def _answer(self, request: Any) -> dict[str, Any]:
        try:
            operation = request.pop("operation")
            return {"value": self._handler.handle(operation, request)}
        except KvwsError as error:
            return {"error": str(error.args[0]), "hint": error.hint}
        except AssertionError as error:
            return {"error": f"integrity: {error}"}
        except Exception as error:
            logger.exception("kvws: control request failed")
            return {"error": f"{type(error).__name__}: {error}"}
