"""Errors in the shape of the Messages API."""

from __future__ import annotations

import pytest

from kvws.errors import (
    BadRequest,
    BodyTooLarge,
    DiskTierFull,
    EngineDied,
    HostRefused,
    KvwsError,
    NoSuchRoute,
    NotAuthorised,
    OtherModel,
    Overloaded,
    PromptTooLong,
    TooManyRequests,
)
from kvws.http.anthropic import ANTHROPIC


class _Timeout(KvwsError):
    http_status = 504


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (BadRequest("x"), 400, "invalid_request_error"),
        (OtherModel("x"), 409, "invalid_request_error"),
        (NotAuthorised("x"), 401, "authentication_error"),
        (HostRefused("x"), 403, "permission_error"),
        (NoSuchRoute("x"), 404, "not_found_error"),
        (BodyTooLarge("x"), 413, "request_too_large"),
        (TooManyRequests("x"), 429, "rate_limit_error"),
        (KvwsError("x"), 500, "api_error"),
        (DiskTierFull("x"), 507, "api_error"),
        (Overloaded("x"), 503, "overloaded_error"),
        (EngineDied("x"), 503, "overloaded_error"),
        (_Timeout("x"), 504, "timeout_error"),
    ],
)
def test_a_status_has_its_error_type(error: KvwsError, status: int, kind: str) -> None:
    reply = ANTHROPIC.error(error)
    assert reply.status == status
    assert reply.body == {"type": "error", "error": {"type": kind, "message": "x"}}


def test_the_hint_is_part_of_the_message() -> None:
    body = ANTHROPIC.error(Overloaded("no room", hint="try again")).body
    assert body["error"]["message"] == "no room (try again)"


def test_a_prompt_that_is_too_long_says_so_in_the_words_that_clients_look_for() -> None:
    reply = ANTHROPIC.error(PromptTooLong(300_000, 262_144))
    assert reply.status == 400
    assert "prompt is too long: 300000 tokens > 262144 maximum" in reply.body["error"]["message"]


def test_nothing_but_the_error_itself_is_told() -> None:
    try:
        try:
            raise OSError("/home/somebody/secret.sock refused")
        except OSError as cause:
            raise EngineDied("the engine is gone") from cause
    except EngineDied as error:
        assert "secret" not in str(ANTHROPIC.error(error))
