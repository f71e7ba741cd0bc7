"""The Responses API, as far as a client can use it that keeps its own history."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping

from kvws.chat.call import ModelCall
from kvws.errors import BadRequest, KvwsError, PromptTooLong, TooManyRequests
from kvws.http.dialect import AnswerWriter, Dialect, ErrorReply
from kvws.http.recollection import Recollection
from kvws.http.responses.read import read_call
from kvws.http.responses.tools import ResponsesCall, ToolOrigin
from kvws.http.responses.write import ResponsesWriter

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
}
_ERROR_CODES = {401: "invalid_api_key"}


class ResponsesDialect:
    """Dialect of POST /v1/responses."""

    name = "responses"

    def read(self, body: object, recollection: Recollection | None = None) -> ModelCall:
        try:
            return read_call(body, recollection or Recollection())
        except RecursionError as error:
            raise BadRequest("the body is nested too deeply") from error

    def writer(self, call: ModelCall) -> AnswerWriter:
        origins: Mapping[str, ToolOrigin] = {}
        if isinstance(call, ResponsesCall):
            origins = call.origins
        return ResponsesWriter(call, origins, uuid.uuid4().hex, int(time.time()))

    def error(self, error: KvwsError) -> ErrorReply:
        """Codex asks again after a 5xx unless its code says server_is_overloaded, so errors of the
        server have no code. After any 4xx it gives the turn up, 429 included: a client that must
        only wait is told 503."""
        status = 503 if isinstance(error, TooManyRequests) else error.http_status
        kind = "server_error" if status >= 500 else "invalid_request_error"
        code = _ERROR_CODES.get(status)
        if isinstance(error, PromptTooLong):
            code = "context_length_exceeded"
        return ErrorReply(
            status,
            {
                "error": {
                    "message": str(error),
                    "type": _ERROR_TYPES.get(status, kind),
                    "param": None,
                    "code": code,
                }
            },
        )


RESPONSES: Dialect = ResponsesDialect()
