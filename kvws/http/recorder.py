"""Records finished calls, one file per session, for `kvws replay`."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field, fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol, cast

import aiofiles

from kvws.chat.answer import AnswerEvent
from kvws.chat.call import ModelCall
from kvws.chat.message import Message, ToolCall
from kvws.chat.whole_answer import assistant_message, finish_of
from kvws.errors import ConfigError, KvwsError, TraceError
from kvws.http.redaction import redact, redact_json, redact_json_text
from kvws.replay.recording import VERSION, VERSION_KEY, plain_message
from kvws.session.caller import Caller
from kvws.store.listing import require_private

_log = logging.getLogger(__name__)

_MAX_REMEMBERED_SESSIONS = 256
_MAX_NAME_CHARS = 48
_MAX_HEADER_BYTES = 1 << 12
_TAIL_BYTES = 1 << 16
_OTHERWISE_RECORDED = frozenset({"model", "messages", "tools", "side_call"})
_ASKING_FOR_NOTHING = ModelCall(model="", messages=())


class Recorder:
    """Appends calls to the files of a directory.

    Nobody but its owner can read what it writes. Headers and keys are no part of a call, so they
    are never written; likely secrets in texts are replaced, unless that is switched off. Sessions
    of one name share a file, whichever API keys they came with.
    """

    def __init__(self, directory: Path, *, redacts: bool = True) -> None:
        """Make the directory if it is missing.

        Raises:
            ConfigError: it cannot be made.
            UnsafeStore, StoreFormatError: a symbolic link, another user's, open to others, or no
                directory.
        """
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            require_private(directory)
        except OSError as error:
            raise ConfigError(
                f"{directory} cannot be recorded to: {error.strerror}",
                hint="name another directory with --record",
            ) from error
        self._directory = directory
        self._redacts = redacts
        self._files: OrderedDict[str, _SessionFile] = OrderedDict()
        self._writing: set[asyncio.Task[None]] = set()

    async def record(
        self,
        caller: Caller,
        call: ModelCall,
        answer: Sequence[AnswerEvent],
        *,
        dialect: str,
        started_at_s: float,
        duration_ms: float,
    ) -> None:
        """Append a call that was answered. Returns when it is written; what cannot be written is
        logged and missing. A caller that is cancelled meanwhile leaves no half line behind.

        Args:
            answer: all of its events; the last is Finished.
            dialect: the name of the dialect it came in.
            started_at_s: when, in seconds since 1970.
            duration_ms: from then to the answer's end.
        """
        recorded = _Recorded(caller, call, tuple(answer), dialect, started_at_s, duration_ms)
        task = asyncio.create_task(self._file_of(caller).append(recorded))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)
        await asyncio.shield(task)

    async def close(self) -> None:
        """Wait until everything is written."""
        await asyncio.gather(*self._writing)

    def _file_of(self, caller: Caller) -> _SessionFile:
        """The file of a session, which is busy from now on. Mutates self."""
        name = file_name(caller)
        file = self._files.setdefault(
            name, _SessionFile(self._directory / name, redacts=self._redacts)
        )
        file.pending += 1
        self._files.move_to_end(name)
        idle = [name for name, file in self._files.items() if not file.pending]
        for forgotten in idle[: max(0, len(self._files) - _MAX_REMEMBERED_SESSIONS)]:
            del self._files[forgotten]
        return file


def file_name(caller: Caller) -> str:
    """What a session's file is called: a readable beginning, made safe, and a digest of the whole
    name and of what gave it."""
    readable = re.sub(r"[^A-Za-z0-9_-]", "-", caller.session)[:_MAX_NAME_CHARS].strip("-")
    whole = f"{caller.source}\0{caller.session}".encode(errors="replace")
    return f"{readable or 'session'}-{blake2b(whole, digest_size=8).hexdigest()}.jsonl"


@dataclass(frozen=True)
class _Recorded:
    caller: Caller
    call: ModelCall
    answer: tuple[AnswerEvent, ...]
    dialect: str
    started_at_s: float
    duration_ms: float


@dataclass(frozen=True)
class _Written:
    """What a file holds already, as far as this process wrote it.

    Attributes:
        threads: digests of the messages of each thread's last call that was no aside.
        tools: digests of the tools.
    """

    threads: dict[str, tuple[bytes, ...]] = field(default_factory=dict[str, tuple[bytes, ...]])
    tools: frozenset[str] = frozenset()


class _File(Protocol):
    """What a session's file asks of an unbuffered aiofiles file."""

    async def read(self, size: int, /) -> bytes: ...
    async def write(self, data: memoryview, /) -> int: ...
    async def seek(self, offset: int, whence: int = ..., /) -> int: ...
    async def truncate(self, size: int, /) -> int: ...


class _SessionFile:
    """One session's file. It is open only while a call is appended.

    Attributes:
        pending: calls that are being appended; a file that has any must not be forgotten.
    """

    def __init__(self, path: Path, *, redacts: bool) -> None:
        self.pending = 0
        self._path = path
        self._redacts = redacts
        self._lock = asyncio.Lock()
        self._written: _Written | None = None

    async def append(self, recorded: _Recorded) -> None:
        """Append one call, or log why it is missing. Mutates self."""
        try:
            async with self._lock:
                await self._append(recorded)
        except (OSError, KvwsError, RecursionError) as error:
            _log.error("a call is missing in %s: %s", self._path, error)
        finally:
            self.pending -= 1

    async def _append(self, recorded: _Recorded) -> None:
        # Unknown until this call is written: after a failure the next one clears away what there
        # is of it, and is written whole.
        written, self._written = self._written, None
        async with _opened(self._path) as file:
            if written is None:
                await _drop_unfinished_line(file)
                await _require_recording(file)
            size_bytes = await file.seek(0, os.SEEK_END)
            head = b"" if size_bytes else _line(_header(recorded.caller))
            data, written = await asyncio.to_thread(
                _lines, recorded, written or _Written(), redacts=self._redacts
            )
            await _write(file, head + data)
        self._written = written


def _header(caller: Caller) -> dict[str, Any]:
    return {VERSION_KEY: VERSION, "session": caller.session, "source": caller.source}


def _lines(recorded: _Recorded, written: _Written, *, redacts: bool) -> tuple[bytes, _Written]:
    """A call as lines, and what the file holds with them."""
    caller, call = recorded.caller, recorded.call
    digests = tuple(_digest(plain_message(message)) for message in call.messages)
    keep = _common_length(digests, written.threads.get(caller.thread, ()))
    tools, tools_line = _tools(call, written, redacts=redacts)
    finish = finish_of(recorded.answer)
    answer = assistant_message(recorded.answer)
    added = call.messages[keep:]
    asked = {
        each.name: getattr(call, each.name)
        for each in fields(call)
        if each.name not in _OTHERWISE_RECORDED
        and getattr(call, each.name) != getattr(_ASKING_FOR_NOTHING, each.name)
    }
    told = {"model": call.model, "stop_text": finish.stop_text, "asked": _plain(asked)}
    if redacts:
        told, answer, added = redact_json(told), _redacted(answer), tuple(map(_redacted, added))
    entry = {
        "thread": caller.thread,
        "aside": call.side_call,
        "dialect": recorded.dialect,
        "started_at_s": recorded.started_at_s,
        "duration_ms": recorded.duration_ms,
        "redacted": redacts,
        **told,
        "tools": tools,
        "keep": keep,
        "add": [plain_message(message) for message in added],
        "answer": plain_message(answer),
        "finish": finish.reason,
        "usage": asdict(finish.usage),
    }
    threads = written.threads if call.side_call else {**written.threads, caller.thread: digests}
    known = written.tools | {tools} if tools else written.tools
    return tools_line + _line({"call": entry}), _Written(threads, known)


def _tools(call: ModelCall, written: _Written, *, redacts: bool) -> tuple[str | None, bytes]:
    """The digest of a call's tools, and the line that tells them if no line did."""
    if not call.tools:
        return None, b""
    schemas = [dict(tool) for tool in call.tools]
    if redacts:
        schemas = redact_json(schemas)
    digest = _digest(schemas).hex()
    line = {"tools": {"digest": digest, "schemas": schemas}}
    return digest, b"" if digest in written.tools else _line(line)


def _redacted(message: Message) -> Message:
    return replace(
        message,
        content=redact(message.content),
        reasoning=redact(message.reasoning),
        name=message.name and redact(message.name),
        tool_call_id=message.tool_call_id and redact(message.tool_call_id),
        tool_calls=tuple(
            ToolCall(redact(call.id), redact(call.name), redact_json_text(call.arguments))
            for call in message.tool_calls
        ),
    )


def _plain(value: object) -> Any:
    return json.loads(json.dumps(value, default=asdict))


def _line(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode(errors="replace") + b"\n"


def _digest(value: object) -> bytes:
    return blake2b(_line(value), digest_size=16).digest()


def _common_length(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def _opened(path: Path) -> AbstractAsyncContextManager[_File]:
    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    return cast(
        "AbstractAsyncContextManager[_File]",
        aiofiles.open(path, "r+b", buffering=0, opener=opener),
    )


async def _drop_unfinished_line(file: _File) -> None:
    """Cut off what a failed write, or a process that died, left behind the last whole line."""
    end = await file.seek(0, os.SEEK_END)
    begin = end
    while begin:
        begin = max(0, begin - _TAIL_BYTES)
        await file.seek(begin)
        tail = await file.read(min(_TAIL_BYTES, end - begin))
        if newline := tail.rfind(b"\n") + 1:
            begin += newline
            break
    if begin < end:
        await file.truncate(begin)


async def _require_recording(file: _File) -> None:
    """Raises: TraceError: the file has other contents than a recording of this version."""
    await file.seek(0)
    first_line = (await file.read(_MAX_HEADER_BYTES)).partition(b"\n")[0]
    if not first_line:
        return
    try:
        version = json.loads(first_line)[VERSION_KEY]
    except (ValueError, TypeError, LookupError):
        version = None
    if version != VERSION:
        raise TraceError(
            "the file is no recording of this version", hint="move it to another directory"
        )


async def _write(file: _File, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[await file.write(rest) :]
