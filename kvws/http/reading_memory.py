"""The last long request of each session, so that the next one is read only where it is new."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from threading import Lock
from typing import Any, cast

from kvws.chat.call import ModelCall
from kvws.http.dialect import Dialect
from kvws.http.recollection import ReadEntry, Recollection

_SHORT_BODY_BYTES = 256 << 10
"""A body of this length reads in two or three milliseconds."""

_NAMING_HEADERS = (
    *("x-kvws-workspace", "x-kvws-thread", "x-claude-code-session-id", "x-claude-code-agent-id"),
    *("x-litellm-session-id", "x-session-id", "session-id", "thread-id"),
)
"""Whatever tells one list of messages from another. A name too few costs time, never truth:
lists that share a place in the memory are compared before anything is taken from it."""

_Key = tuple[str, ...]


class ReadingMemory:
    """Reads bodies, and remembers the message lists of long ones. Safe to use from threads.

    What was read under one salt is never looked at under another, so that neither the answer nor
    the time that it takes says what another API key has sent.

    Of each list the decoded entries stay. Their texts are for the most part the very strings of
    its messages, which the session's transcript keeps anyway; what comes on top is what messages
    leave out, such as images, and some 600 bytes a content block. Two requests of one session at
    a time each read from the list before both; the later one to end is remembered.
    """

    def __init__(self, lists_max: int = 64, bytes_max: int = 256 << 20) -> None:
        """
        Args:
            lists_max: message lists that are remembered; the longest unused goes first.
            bytes_max: of the bodies that they came in; a text with any wide character takes two or
                four times as many.
        """
        self._lists_max = lists_max
        self._bytes_max = bytes_max
        self._lists: OrderedDict[_Key, tuple[tuple[ReadEntry, ...], int]] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def read(
        self,
        dialect: Dialect,
        body: object,
        *,
        body_bytes: int,
        salt: str,
        headers: Mapping[str, str],
    ) -> ModelCall:
        """The call in a decoded body: `dialect.read(body)`.

        Args:
            body_bytes: its length before it was decoded.
            salt: of the caller's API key.
            headers: with names in lower case.

        Raises:
            BadRequest: as `dialect.read`. What is remembered stays as it was.
        """
        if body_bytes <= _SHORT_BODY_BYTES:
            return dialect.read(body)
        key = (dialect.name, salt, *_names(headers, body))
        recollection = Recollection(self._remembered(key))
        call = dialect.read(body, recollection)
        self._remember(key, recollection.entries, body_bytes)
        return call

    def _remembered(self, key: _Key) -> tuple[ReadEntry, ...]:
        with self._lock:
            if key not in self._lists:
                return ()
            self._lists.move_to_end(key)
            return self._lists[key][0]

    def _remember(self, key: _Key, entries: tuple[ReadEntry, ...], body_bytes: int) -> None:
        """Mutates self. What makes room is freed only after the lock."""
        gone: list[tuple[tuple[ReadEntry, ...], int]] = []
        with self._lock:
            if key in self._lists:
                gone.append(self._lists.pop(key))
                self._bytes -= gone[-1][1]
            self._lists[key] = (entries, body_bytes)
            self._bytes += body_bytes
            while len(self._lists) > self._lists_max or self._bytes > self._bytes_max:
                _, least_used = self._lists.popitem(last=False)
                self._bytes -= least_used[1]
                gone.append(least_used)


def _names(headers: Mapping[str, str], body: object) -> tuple[str, ...]:
    """What a client calls its session and thread: names with their values."""
    named = {name: headers[name] for name in _NAMING_HEADERS if name in headers}
    in_body = {
        "prompt_cache_key": _member(body, "prompt_cache_key"),
        "metadata.user_id": _member(_member(body, "metadata"), "user_id"),
    }
    named |= {name: value for name, value in in_body.items() if isinstance(value, str)}
    return tuple(part for name in named.items() for part in name)


def _member(value: object, name: str) -> object:
    return cast("Mapping[str, Any]", value).get(name) if isinstance(value, dict) else None
