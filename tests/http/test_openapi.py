"""The OpenAPI document is complete, and true."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    positive_data_acceptance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from kvws.errors import (
    DiskTierFull,
    EngineDied,
    KvwsError,
    Overloaded,
    PromptTooLong,
    TooManyRequests,
)
from kvws.http.options import FrontOptions
from tests.http.asking import CALLS, KEY, app_of, ask
from tests.http.fake_service import FakeService

OPTIONS = FrontOptions(keys=(KEY,), allowed_hosts=("testserver",))
APP = app_of(FakeService(), OPTIONS)
DOCUMENT: dict[str, Any] = APP.openapi()
SCHEMA = schemathesis.openapi.from_asgi(
    "/openapi.json", APP, headers={"x-api-key": KEY, "host": "127.0.0.1"}
)
OPERATIONS = [found.ok() for found in SCHEMA.get_all_operations()]
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    positive_data_acceptance,
    unsupported_method,
]


def test_every_route_is_in_the_document() -> None:
    routes = {
        (route.path.replace(":path", ""), method.lower())
        for route in APP.routes
        if isinstance(route, APIRoute)
        for method in route.methods - {"HEAD"}
    }
    documented = {
        (path, method) for path, operations in DOCUMENT["paths"].items() for method in operations
    }
    assert documented == routes


def test_the_document_itself_needs_the_key_and_there_are_no_pages_around_it() -> None:
    assert ask(APP, "GET", "/openapi.json").status_code == 401
    assert ask(APP, "GET", "/openapi.json", x_api_key=KEY).json() == DOCUMENT
    for path in ("/docs", "/redoc", "/docs/oauth2-redirect"):
        assert ask(APP, "GET", path, x_api_key=KEY).status_code == 404


def test_open_routes_are_the_only_ones_without_security() -> None:
    free = {
        path
        for path, operations in DOCUMENT["paths"].items()
        for operation in operations.values()
        if not operation["security"]
    }
    assert free == {"/", "/healthz"}


def whole_numbers_spelled_so(value: Any) -> Any:
    """To a JSON schema 5.0 is an integer, to JSON clients and servers it is not."""
    match value:
        case dict():
            return {key: whole_numbers_spelled_so(each) for key, each in value.items()}
        case list():
            return [whole_numbers_spelled_so(each) for each in value]
        case float() if value.is_integer():
            return int(value) if abs(value) < 2**53 else 0
        case _:
            return value


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_every_answer_is_as_documented(operation: Any) -> None:
    @settings(
        max_examples=18,
        derandomize=True,
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy())
    def check(case: Case) -> None:
        case.body = whole_numbers_spelled_so(case.body)
        reply = case.call(headers={"x-api-key": KEY})
        case.validate_response(reply, checks=CHECKS, headers={"x-api-key": KEY})

    check()


@pytest.mark.parametrize("path", list(CALLS))
@pytest.mark.parametrize(
    "error",
    [
        PromptTooLong(2, 1),
        TooManyRequests("slow down"),
        Overloaded("busy"),
        EngineDied("gone"),
        DiskTierFull("full"),
        KvwsError("broken"),
        ValueError("broken"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_failure_is_as_documented(path: str, error: Exception) -> None:
    service = FakeService()
    service.admitting = error
    app = app_of(service, OPTIONS)
    schema = schemathesis.openapi.from_dict(app.openapi())
    reply = ask(app, "POST", path, CALLS[path], x_api_key=KEY)
    assert reply.status_code >= 400
    schema[path]["POST"].validate_response(reply)
    assert str(reply.status_code) in DOCUMENT["paths"][path]["post"]["responses"]
