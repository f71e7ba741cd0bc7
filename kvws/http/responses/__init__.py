"""The Responses dialect: POST /v1/responses, which Codex speaks."""

from kvws.http.responses.dialect import RESPONSES

__all__ = ["RESPONSES"]
