"""Errors as OpenAI's clients know them."""

from __future__ import annotations

from typing import Any

from kvws.errors import KvwsError, PromptTooLong

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_CODES = {401: "invalid_api_key", 404: "not_found", 429: "rate_limit_exceeded"}


def error_body(error: KvwsError) -> dict[str, Any]:
    """The body of an error reply, which is also the data of a stream's error frame."""
    status = error.http_status
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {
        "error": {
            "message": _message(error),
            "type": kind,
            "param": None,
            "code": "context_length_exceeded"
            if isinstance(error, PromptTooLong)
            else _CODES.get(status),
        }
    }


def _message(error: KvwsError) -> str:
    if not isinstance(error, PromptTooLong):
        return str(error)
    # Clients compact or give up by these words: the first sentence is what Claude Code's proxies
    # look for, the beginning of the second is how litellm tells an overflow from a bad request.
    return (
        f"prompt is too long: {error.prompt_tokens} tokens > {error.window_tokens} maximum. "
        f"This model's maximum context length is {error.window_tokens} tokens: {error.hint}."
    )
