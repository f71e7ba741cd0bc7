"""The data plane's side of the control socket: a Unix socket in a directory of mode 0700."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from pathlib import Path
from typing import Any, Protocol

from kvws.engine import wire
from kvws.engine.threads import leave_cores_to_the_forward_pass
from kvws.errors import ControlError, KvwsError

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
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # close() alone leaves accept() waiting
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
        leave_cores_to_the_forward_pass()
        with connection, contextlib.suppress(OSError):
            try:
                while (request := wire.receive(connection)) is not None:
                    connection.sendall(self._answer(request))
            except (ControlError, ValueError) as error:
                logger.warning("kvws: control connection closed, it sent no message: %s", error)

    def _answer(self, request: Any) -> bytes:
        try:
            operation = request.pop("operation")
            return wire.encode({"value": self._handler.handle(operation, request)})
        except KvwsError as error:
            return wire.encode({"error": str(error.args[0]), "hint": error.hint})
        except AssertionError as error:
            return wire.encode({"error": f"integrity: {error}"})
        except Exception as error:
            logger.exception("kvws: control request failed")
            return wire.encode({"error": f"{type(error).__name__}: {error}"})
