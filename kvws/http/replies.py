"""Whole replies: JSON bodies, and errors in the shape of the dialect that was spoken."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.responses import Response

from kvws.errors import KvwsError, Overloaded, TooManyRequests
from kvws.http.dialect import Dialect
from kvws.http.security import Headers


@dataclass(frozen=True)
class Dialects:
    """The dialects that are spoken here."""

    anthropic: Dialect
    chat_completions: Dialect
    responses: Dialect

    def of(self, path: str, headers: Headers) -> Dialect:
        """The dialect that a client expects at a path, also where there is nothing."""
        if _is_at(path, "/v1/messages"):
            return self.anthropic
        if _is_at(path, "/v1/responses"):
            return self.responses
        if _is_at(path, "/v1/models") and speaks_anthropic(headers):
            return self.anthropic
        return self.chat_completions


def speaks_anthropic(headers: Headers) -> bool:
    """Whether a client of routes that both have, such as the list of models, is Anthropic's."""
    if "anthropic-version" in headers:
        return True
    return "x-api-key" in headers and "authorization" not in headers


def json_reply(
    body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A JSON object; numbers may be numpy's, and keys whatever can be told as text."""
    content = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    return Response(content, status, headers, media_type="application/json")


def error_reply(dialect: Dialect, error: KvwsError) -> Response:
    """An error before the answer has begun."""
    reply = dialect.error(error)
    headers: dict[str, str] = {"cache-control": "no-store"}
    if isinstance(error, Overloaded | TooManyRequests):
        headers["retry-after"] = str(error.retry_after_s)
    match reply.status:
        case 401:
            headers["www-authenticate"] = "Bearer"
        case 408:  # the rest of the body may still come, and must not be taken for a request
            headers["connection"] = "close"
        case 415:
            headers["accept-encoding"] = "identity"
        case _:
            pass
    return json_reply(reply.body, reply.status, headers)


def internal_error(request_id: str) -> KvwsError:
    """What a client is told of a fault of ours; the log has the rest under `request_id`."""
    return KvwsError(f"internal error {request_id}", hint="the server's log says more")


def fault_text(fault: BaseException) -> str:
    """Where a fault of ours happened. Not its message: that may quote what a client sent."""
    frames = traceback.extract_tb(fault.__traceback__)
    places = " < ".join(f"{f.filename}:{f.lineno} {f.name}" for f in reversed(frames))
    text = f"{type(fault).__name__} at {places}"
    cause = fault.__cause__ or fault.__context__
    return f"{text}; after {fault_text(cause)}" if cause else text


def _is_at(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(prefix + "/")
