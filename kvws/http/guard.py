"""The outermost layer: nothing gets past it unasked, and nothing leaves it unexplained."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvws.errors import KvwsError, Overloaded
from kvws.http.metrics import FrontMetrics
from kvws.http.replies import Dialects, error_reply, fault_text, internal_error
from kvws.http.security import Gatekeeper, header_map

OPEN_PATHS = frozenset({"/", "/healthz"})
"""What answers without a key: that there is a server, and whether it is ready."""

SALT = "kvws.salt"
REQUEST_ID = "kvws.request_id"
STARTED_S = "kvws.started_s"
DIALECT = "kvws.dialect"
"""Where a request's scope has what was found out here. STARTED_S is as `time.perf_counter`
says; DIALECT is the name of the dialect that a route speaks, if it is one for calls."""

_CLIENT_LEFT = 499
_log = logging.getLogger("kvws.http")


class Guard:
    """Checks host and key before anything else is looked at, and turns errors into replies."""

    def __init__(
        self, app: ASGIApp, gatekeeper: Gatekeeper, dialects: Dialects, metrics: FrontMetrics
    ) -> None:
        self._app = app
        self._gatekeeper = gatekeeper
        self._dialects = dialects
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = scope[STARTED_S] = time.perf_counter()
        request_id = scope[REQUEST_ID] = f"req_{secrets.token_hex(12)}"
        outgoing = _Outgoing(send, request_id)
        dialect = self._dialects.of(scope["path"], header_map(scope["headers"]))
        try:
            error = await self._pass_on(scope, receive, outgoing)
            if error is not None and not outgoing.status:
                await error_reply(dialect, error)(scope, receive, outgoing)
        except ClientDisconnect:
            outgoing.status = _CLIENT_LEFT
        finally:
            self._account(scope, outgoing.status, time.perf_counter() - started_s)

    async def _pass_on(
        self, scope: Scope, receive: Receive, outgoing: _Outgoing
    ) -> KvwsError | None:
        """Let the request in; why it has no answer, if it has none."""
        request_id = scope[REQUEST_ID]
        try:
            headers = header_map(scope["headers"])
            self._gatekeeper.check_host(headers)
            if scope["path"] not in OPEN_PATHS:
                scope[SALT] = self._gatekeeper.salt(headers)
            await self._app(scope, receive, outgoing)
        except ClientDisconnect:
            raise
        except KvwsError as error:
            if error.http_status >= 500:
                _log.error("%s %s: %s", request_id, type(error).__name__, error)
            return error
        except asyncio.CancelledError:  # only a server that stops cancels requests
            return Overloaded("the server is stopping", hint="try again", retry_after_s=5)
        except Exception as fault:
            _log.error("%s %s", request_id, fault_text(fault))
            return internal_error(request_id)
        return None

    def _account(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "none")
        self._metrics.request_ended(route, scope.get(DIALECT, "none"), status, seconds)
        _log.info(
            "%s %s %s %d %.0f ms",
            scope[REQUEST_ID],
            scope["method"],
            route,
            status,
            1000 * seconds,
        )


class _Outgoing:
    """Sends a response under its request's id, and knows its status: 0 until there is one."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        # Each family of clients looks for the id under a name of its own.
        self._ids = [(b"request-id", request_id.encode()), (b"x-request-id", request_id.encode())]
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), *self._ids]}
        await self._send(message)
