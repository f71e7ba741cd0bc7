"""The chat-completions dialect as a whole, and which of its calls are asides."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping

from kvws.chat.call import ModelCall
from kvws.errors import KvwsError
from kvws.http.chat_completions.errors import error_body
from kvws.http.chat_completions.request import read_call
from kvws.http.chat_completions.writer import ChatCompletionWriter
from kvws.http.dialect import Dialect, ErrorReply
from kvws.http.recollection import Recollection

_OPENCODE_SESSION = "x-session-affinity"


def is_aside(call: ModelCall, headers: Mapping[str, str]) -> bool:
    """Whether a call is no turn of its session's conversation.

    Agents offer tools on every turn. opencode asks for a title, or for a summary, under its
    session's id and without tools; only a header that no other client sends tells that from a
    chat with a person.

    Args:
        headers: of the request, by lower-case name.
    """
    return call.side_call or (not call.tools and _OPENCODE_SESSION in headers)


class _ChatCompletions:
    name = "chat"

    def read(self, body: object, recollection: Recollection | None = None) -> ModelCall:
        return read_call(body, recollection or Recollection())

    def writer(self, call: ModelCall) -> ChatCompletionWriter:
        return ChatCompletionWriter(
            call, answer_id=f"chatcmpl-{uuid.uuid4().hex}", created_s=int(time.time())
        )

    def error(self, error: KvwsError) -> ErrorReply:
        return ErrorReply(error.http_status, error_body(error))


CHAT_COMPLETIONS: Dialect = _ChatCompletions()
