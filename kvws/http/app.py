"""The application: every route there is, behind the guard.

bytes → guard (host, key) → route → calls (body, dialect, session) → answer
                                  → inspection
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvws import __version__
from kvws.errors import NoSuchRoute
from kvws.http.admission import Admission
from kvws.http.calls import Identify, Listener, ModelCalls
from kvws.http.dialect import Dialect
from kvws.http.guard import DIALECT, Guard
from kvws.http.incoming import refused
from kvws.http.inspection import SESSION_PATTERN, Inspection
from kvws.http.metrics import FrontMetrics
from kvws.http.openapi import DescribedApp, described_call, described_page
from kvws.http.options import FrontOptions
from kvws.http.replies import Dialects, error_reply, json_reply
from kvws.http.schemas import ANYTHING, MODEL, MODELS
from kvws.http.security import Gatekeeper, header_map
from kvws.serving.service import ModelService

Serve = Callable[[Dialect, Scope, Receive, Send], Awaitable[None]]


def make_app(
    service: ModelService,
    dialects: Dialects,
    identify: Identify,
    options: FrontOptions,
    listener: Listener | None = None,
) -> FastAPI:
    """The endpoint in front of a service.

    Args:
        listener: is told of every call that was answered to its end.

    Raises:
        ConfigError: the server could be reached from elsewhere without a key.
    """
    gatekeeper = Gatekeeper(options.keys, options.host, options.allowed_hosts)
    admission = Admission(options.answering_max, options.waiting_max, options.per_session_max)
    metrics = FrontMetrics(admission)
    calls = ModelCalls(service, identify, options, admission, metrics, listener)
    app = DescribedApp(
        title="kvws",
        version=__version__,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    _add_calls(app, dialects, calls)
    _add_pages(app, Inspection(service, metrics))
    app.add_exception_handler(HTTPException, _routing_error(dialects))
    app.add_middleware(Guard, gatekeeper=gatekeeper, dialects=dialects, metrics=metrics)
    return app


def _add_calls(app: FastAPI, dialects: Dialects, calls: ModelCalls) -> None:
    routes: list[tuple[str, Dialect, Serve]] = [
        ("/v1/messages", dialects.anthropic, calls.answer),
        ("/v1/messages/count_tokens", dialects.anthropic, calls.count_tokens),
        ("/v1/chat/completions", dialects.chat_completions, calls.answer),
        ("/v1/responses", dialects.responses, calls.answer),
    ]
    for path, dialect, serve in routes:
        endpoint = _endpoint(dialect, serve)
        app.add_api_route(path, endpoint, methods=["POST"], **described_call(path))


def _add_pages(app: FastAPI, pages: Inspection) -> None:
    async def document(request: Request) -> Response:
        return json_reply(app.openapi())

    for path, page in (("/", pages.greeting), ("/healthz", pages.health)):
        app.add_api_route(path, page, **described_page(ANYTHING, is_open=True))
        app.add_api_route(path, page, methods=["HEAD"], include_in_schema=False)
    text = described_page({"type": "string"}, media_type="text/plain")
    app.add_api_route("/metrics", pages.figures, **text)
    app.add_api_route("/openapi.json", document, **described_page(ANYTHING))
    app.add_api_route("/v1/models", pages.models, **described_page(MODELS))
    named = {"model_id": {"type": "string", "minLength": 1}}
    app.add_api_route(
        "/v1/models/{model_id:path}",
        pages.model,
        **described_page(MODEL, path_parameters=named, errors=[404]),
    )
    app.add_api_route("/v1/kvws/state", pages.state, **described_page(ANYTHING))
    named = {"session_id": {"type": "string", "pattern": SESSION_PATTERN}}
    app.add_api_route(
        "/v1/kvws/sessions/{session_id}",
        pages.session,
        **described_page(ANYTHING, path_parameters=named, errors=[404]),
    )


def _endpoint(dialect: Dialect, serve: Serve) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return _Served(dialect, serve)

    return endpoint


class _Served(Response):
    """A response that reads the request and sends itself, piece by piece."""

    def __init__(self, dialect: Dialect, serve: Serve) -> None:
        super().__init__()
        self._dialect = dialect
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[DIALECT] = self._dialect.name
        await self._serve(self._dialect, scope, receive, send)


def _routing_error(
    dialects: Dialects,
) -> Callable[[Request, Exception], Awaitable[Response]]:
    """How the router says that there is no such route, in the client's dialect."""

    async def handle(request: Request, exception: Exception) -> Response:
        assert isinstance(exception, HTTPException)
        if exception.status_code == 405:
            error = refused(405, f"{request.method} is not served here", hint="see /openapi.json")
        else:
            error = NoSuchRoute("there is nothing at this path", hint="see /openapi.json")
        dialect = dialects.of(request.scope["path"], header_map(request.scope["headers"]))
        reply = error_reply(dialect, error)
        reply.headers.update(exception.headers or {})
        return reply

    return handle
