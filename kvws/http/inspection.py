"""Routes that only look: is the server there, what does it serve, how is it doing."""

from __future__ import annotations

import re
import time
from typing import Any

from fastapi import Request
from starlette.responses import Response

from kvws import __version__
from kvws.errors import BadRequest, NoSuchRoute
from kvws.http.guard import SALT
from kvws.http.metrics import CONTENT_TYPE, FrontMetrics
from kvws.http.model_list import model_list, one_model
from kvws.http.replies import json_reply, speaks_anthropic
from kvws.http.security import header_map
from kvws.serving.service import ModelService

SESSION_PATTERN = "^[A-Za-z0-9._:-]{1,128}$"

_SESSION = re.compile(SESSION_PATTERN[1:-1])


class Inspection:
    """What there is to see of a service, without touching it."""

    def __init__(self, service: ModelService, metrics: FrontMetrics) -> None:
        self._service = service
        self._metrics = metrics
        self._created = int(time.time())

    async def greeting(self, request: Request) -> Response:
        return json_reply({"kvws": __version__})

    async def health(self, request: Request) -> Response:
        """There is no server before its model can answer, so being there is being ready."""
        return json_reply({"status": "ready"})

    async def figures(self, request: Request) -> Response:
        state = await self._service.inspect(salt=request.scope[SALT])
        return Response(self._metrics.text(state), headers={"content-type": CONTENT_TYPE})

    async def models(self, request: Request) -> Response:
        listed = model_list(self._service.model, self._service.window_tokens, **self._ask(request))
        return json_reply(listed)

    async def model(self, request: Request) -> Response:
        model, window_tokens = self._service.model, self._service.window_tokens
        name = request.path_params["model_id"]
        return json_reply(one_model(name, model, window_tokens, **self._ask(request)))

    async def state(self, request: Request) -> Response:
        """All figures, and the key's own sessions: no key learns of another's."""
        return json_reply(await self._service.inspect(salt=request.scope[SALT]))

    async def session(self, request: Request) -> Response:
        """Raises:
        BadRequest: that is no name of a session.
        NoSuchRoute: none has that name.
        """
        name = request.path_params["session_id"]
        if not _SESSION.fullmatch(name):
            raise BadRequest(
                "that is no session's name", hint="names have 1 to 128 of A-Z, a-z, 0-9 and ._:-"
            )
        found = await self._service.inspect_session(name, salt=request.scope[SALT])
        if found is None:
            raise NoSuchRoute(
                "this key has no session of that name", hint="/v1/kvws/state lists sessions"
            )
        return json_reply(found)

    def _ask(self, request: Request) -> dict[str, Any]:
        headers = header_map(request.scope["headers"])
        return {"created": self._created, "anthropic": speaks_anthropic(headers)}
