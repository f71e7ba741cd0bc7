"""The OpenAPI document: what `app.openapi()` says of each route, and who may call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI

from kvws.http.schemas import ANSWERS, ANTHROPIC_ERROR, EVENT, OPENAI_ERROR, REQUESTS, Schema
from kvws.http.sse import MEDIA_TYPE as EVENT_STREAM

JSON = "application/json"

_REFUSALS = (400, 403)
_LOCKED_REFUSALS = (*_REFUSALS, 401)
_CALL_ERRORS = (*_LOCKED_REFUSALS, 408, 409, 413, 415, 429, 500, 503, 507)
_KEYS: Mapping[str, Schema] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


class DescribedApp(FastAPI):
    """An app without pages of its own, whose document names the ways to send a key."""

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        document.setdefault("components", {})["securitySchemes"] = dict(_KEYS)
        return document


def described_call(path: str) -> dict[str, Any]:
    """Arguments of `add_api_route` for the POST of a dialect's call."""
    error = ANTHROPIC_ERROR if path.startswith("/v1/messages") else OPENAI_ERROR
    answer = {JSON: {"schema": ANSWERS[path]}}
    if "stream" in REQUESTS[path]["properties"]:
        answer[EVENT_STREAM] = {"schema": EVENT}
    body = {"required": True, "content": {JSON: {"schema": REQUESTS[path]}}}
    return {
        "responses": {
            200: {"description": "The answer", "content": answer},
            **_errors(_CALL_ERRORS, error),
        },
        "openapi_extra": {"requestBody": body, "security": _locked()},
    }


def described_page(
    schema: Schema,
    *,
    media_type: str = JSON,
    is_open: bool = False,
    path_parameters: Mapping[str, Schema] | None = None,
    errors: Iterable[int] = (),
) -> dict[str, Any]:
    """Arguments of `add_api_route` for a GET.

    Args:
        is_open: whether it answers without a key.
        errors: statuses beside those that any request can meet with.
    """
    either_error: Schema = {"anyOf": [ANTHROPIC_ERROR, OPENAI_ERROR]}
    refusals = _REFUSALS if is_open else _LOCKED_REFUSALS
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": each}
        for name, each in (path_parameters or {}).items()
    ]
    return {
        "responses": {
            200: {"description": "The page", "content": {media_type: {"schema": schema}}},
            **_errors((*refusals, 500, *errors), either_error),
        },
        "openapi_extra": {"parameters": parameters, "security": [] if is_open else _locked()},
    }


def _locked() -> list[dict[str, list[str]]]:
    return [{name: []} for name in _KEYS]


def _errors(statuses: Iterable[int], schema: Schema) -> dict[int, dict[str, Any]]:
    return {
        status: {
            "description": HTTPStatus(status).phrase,
            "content": {JSON: {"schema": schema}},
        }
        for status in sorted(statuses)
    }
