"""Which session and thread a request belongs to, from what its client says about itself.

The first of these that is there names the session:

    x-kvws-workspace           a person; x-kvws-thread names the thread
    x-claude-code-session-id   Claude Code; sub-agents share it, and add x-claude-code-agent-id
    x-litellm-session-id       OpenHands
    x-session-id               opencode
    session-id                 Codex; sub-agents have a thread-id of their own
    prompt_cache_key           in the body
    metadata.user_id           in the body: JSON text with a session_id
    the prompt                 a digest of how it begins

A name that is there but malformed is an error: to skip it, or to cut it, would mix sessions up.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from itertools import takewhile
from typing import Any, cast

from kvws.chat.call import ModelCall
from kvws.errors import BadRequest
from kvws.session.caller import MAIN_THREAD, Caller, IdentitySource

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_DIGEST_BYTES = 20
_READABLE_CHARS = 12
_SESSION_HEADERS: tuple[IdentitySource, ...] = (
    "x-kvws-workspace",
    "x-claude-code-session-id",
    "x-litellm-session-id",
    "x-session-id",
    "session-id",
)


def identify(headers: Mapping[str, str], body: object, call: ModelCall) -> Caller:
    """Who makes a call.

    Args:
        headers: with names in lower case.
        body: the decoded JSON body.
        call: the same, read.

    Raises:
        BadRequest: a name of a session or a thread is malformed, or x-kvws-thread comes without
            x-kvws-workspace.
    """
    source, session = _session(headers, body, call)
    return Caller(session, _thread(headers, source), source)


def workspace_name(caller: Caller, salt: str) -> str:
    """What a caller's session is called in the store.

    Letters, digits and one hyphen; it begins like the session's own name. Callers of different
    salts, sessions or sources get different names.
    """
    key = hashlib.blake2b(salt.encode("utf-8", "surrogatepass")).digest()
    named = f"{caller.source}\0{caller.session}".encode()
    digest = hashlib.blake2b(named, key=key, digest_size=_DIGEST_BYTES).hexdigest()
    readable = re.sub("[^A-Za-z0-9]", "", caller.session)[:_READABLE_CHARS]
    return f"{readable or 'session'}-{digest}"


def _session(
    headers: Mapping[str, str], body: object, call: ModelCall
) -> tuple[IdentitySource, str]:
    for name in _SESSION_HEADERS:
        if name in headers:
            return name, _valid(headers[name], name)
    fields = _object(body)
    if (key := fields.get("prompt_cache_key")) is not None:
        return "prompt_cache_key", _valid(key, "prompt_cache_key")
    if (session := _session_in_user_id(fields.get("metadata"))) is not None:
        return "metadata.user_id", _valid(session, "session_id in metadata.user_id")
    return "prompt", _prompt_digest(call)


def _thread(headers: Mapping[str, str], source: IdentitySource) -> str:
    """The thread that a person names, else the one that the client does, whatever names the
    session: sub-agents stay apart in a workspace that they share."""
    if "x-kvws-thread" in headers:
        if source != "x-kvws-workspace":
            raise BadRequest(
                "x-kvws-thread names a thread of no workspace",
                hint="send x-kvws-workspace with it",
            )
        return _valid(headers["x-kvws-thread"], "x-kvws-thread")
    if "x-claude-code-agent-id" in headers:
        return _valid(headers["x-claude-code-agent-id"], "x-claude-code-agent-id")
    thread = headers.get("thread-id")
    if thread is not None and "session-id" in headers and thread != headers["session-id"]:
        return _valid(thread, "thread-id")
    return MAIN_THREAD


def _valid(value: object, name: str) -> str:
    if isinstance(value, str) and _ID.fullmatch(value):
        return value
    raise BadRequest(
        f"{name} is no usable id",
        hint="send 1 to 128 of A-Z, a-z, 0-9 and ._:- in it, or leave it out",
    )


def _session_in_user_id(metadata: object) -> object | None:
    user_id = _object(metadata).get("user_id")
    if not isinstance(user_id, str):
        return None
    try:
        named = json.loads(user_id)
    except (ValueError, RecursionError):
        return None
    return _object(named).get("session_id")


def _prompt_digest(call: ModelCall) -> str:
    """Of what stays the same while a session lasts: how the system prompt, the tools and the first
    user message read. A session without a user message is told by its first message alone."""
    system_prompt = takewhile(lambda each: each.role == "system", call.messages)
    first_task = next((each for each in call.messages if each.role == "user"), call.messages[0])
    beginning = [[each.content for each in system_prompt], call.tools, first_task.role]
    text = json.dumps([*beginning, first_task.content], ensure_ascii=False, sort_keys=True)
    data = text.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def _object(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}
