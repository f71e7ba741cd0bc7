"""Errors before an answer, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

import pytest

from kvws.errors import BadRequest, NoSuchRoute, NotAuthorised, Overloaded, PromptTooLong
from kvws.http.responses import RESPONSES


def test_a_prompt_that_is_too_long_is_named_so() -> None:
    reply = RESPONSES.error(PromptTooLong(2_000, 1_000))
    assert reply.status == 400
    assert reply.body["error"]["code"] == "context_length_exceeded"
    message = reply.body["error"]["message"]
    assert "prompt is too long: 2000 tokens > 1000 maximum" in message


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (BadRequest("no"), 400, "invalid_request_error", None),
        (NotAuthorised("no"), 401, "authentication_error", "invalid_api_key"),
        (NoSuchRoute("no"), 404, "not_found_error", None),
        (Overloaded("no"), 503, "server_error", None),
    ],
)
def test_errors_have_openais_shape(error: Any, status: int, kind: str, code: str | None) -> None:
    reply = RESPONSES.error(error)
    expected = {"message": "no", "type": kind, "param": None, "code": code}
    assert (reply.status, reply.body) == (status, {"error": expected})


def test_a_hint_is_part_of_the_message() -> None:
    reply = RESPONSES.error(BadRequest("no", hint="say yes"))
    assert reply.body["error"]["message"] == "no (say yes)"
