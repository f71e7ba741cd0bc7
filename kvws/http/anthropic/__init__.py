"""The Messages API: `POST /v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from kvws.chat.call import ModelCall
from kvws.errors import KvwsError
from kvws.http.anthropic.answer import AnthropicWriter
from kvws.http.anthropic.errors import error_body
from kvws.http.anthropic.request import read_call
from kvws.http.dialect import Dialect, ErrorReply
from kvws.http.recollection import Recollection


class AnthropicDialect:
    """The dialect of Claude Code and of other clients of the Messages API."""

    name = "anthropic"

    def read(self, body: object, recollection: Recollection | None = None) -> ModelCall:
        return read_call(body, recollection or Recollection())

    def writer(self, call: ModelCall) -> AnthropicWriter:
        return AnthropicWriter(call.model)

    def error(self, error: KvwsError) -> ErrorReply:
        return ErrorReply(error.http_status, error_body(error))


ANTHROPIC: Dialect = AnthropicDialect()

__all__ = ["ANTHROPIC"]
