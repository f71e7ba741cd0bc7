"""From a file to JSON values: size limits, decompression, text, document or lines."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvws.errors import TraceError

MAX_TRACE_BYTES = 1 << 30
MAX_XZ_MEMORY_BYTES = 256 << 20
SUPPORTED_HINT = (
    "supported: recordings of `kvws serve`, Claude Code transcripts (JSON lines), "
    "mini-swe-agent and SWE-agent trajectories, OpenHands v0 runs and OpenAI-style chat logs, "
    "plain or compressed with xz or gzip"
)

_XZ_MAGIC = b"\xfd7zXZ\x00"
_GZIP_MAGIC = b"\x1f\x8b"
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Document:
    """Parsed contents of a trace file.

    Attributes:
        value: the JSON value of a plain document, or None.
        rows: the values of a JSON-lines file; of a plain document, the document alone.
        cut_lines: 1 if the last line ends early, as in a file that is still being written.
    """

    value: Any
    rows: list[Any]
    cut_lines: int = 0


def read_bounded(path: Path, *, limit_bytes: int = MAX_TRACE_BYTES) -> bytes:
    """The uncompressed bytes of `path`.

    Raises:
        TraceError: no such file, unreadable, a damaged archive, or over `limit_bytes`.
    """
    try:
        if not path.is_file():
            raise TraceError(f"{path} is not a file", hint="give the path of one recorded session")
        if path.stat().st_size > limit_bytes:
            raise _too_large(limit_bytes)
        return decompress(path.read_bytes(), limit_bytes=limit_bytes)
    except (OSError, ValueError) as error:
        raise TraceError(
            f"{path} cannot be read: {error}", hint="check the path and its permissions"
        ) from error


def decompress(data: bytes, *, limit_bytes: int = MAX_TRACE_BYTES) -> bytes:
    """`data` itself, or its contents where its first bytes say xz or gzip.

    Raises:
        TraceError: a damaged archive, or contents over `limit_bytes`.
    """
    try:
        if data.startswith(_XZ_MAGIC):
            return _unxz(data, limit_bytes)
        if data.startswith(_GZIP_MAGIC):
            return _ungzip(data, limit_bytes)
    except (lzma.LZMAError, zlib.error, EOFError, OSError) as error:
        raise TraceError(
            f"the archive is damaged: {error}", hint="fetch the file again"
        ) from error
    return data


def _unxz(data: bytes, limit_bytes: int) -> bytes:
    out = bytearray()
    while data:  # an xz file is one or more streams, with zero padding between them
        stream = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MAX_XZ_MEMORY_BYTES)
        while not stream.eof:
            if stream.needs_input and not data:
                raise EOFError("it ends early")
            out += stream.decompress(data, max_length=_CHUNK_BYTES)
            data = b""
            if len(out) > limit_bytes:
                raise _too_large(limit_bytes)
        data = stream.unused_data.lstrip(b"\x00")
    return bytes(out)


def _ungzip(data: bytes, limit_bytes: int) -> bytes:
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
        out = bytearray()
        while chunk := stream.read(_CHUNK_BYTES):
            out += chunk
            if len(out) > limit_bytes:
                raise _too_large(limit_bytes)
    return bytes(out)


def _too_large(limit_bytes: int) -> TraceError:
    return TraceError(f"the trace is larger than {limit_bytes} bytes", hint="split the recording")


def parse_document(data: bytes) -> Document:
    """One JSON document, or JSON lines of which only the last may be cut off.

    Raises:
        TraceError: empty, not UTF-8, or not JSON.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TraceError("the file is not UTF-8 text", hint=SUPPORTED_HINT) from error
    if not text.strip():
        raise TraceError("the file is empty", hint=SUPPORTED_HINT)
    try:
        value = _parse(text)
    except ValueError:
        return _parse_lines(text)
    return Document(value, [value])


def _parse_lines(text: str) -> Document:
    # Split at "\n" alone: JSON text may hold other line separators unescaped.
    lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    rows: list[Any] = []
    for number, line in lines:
        try:
            rows.append(_parse(line))
        except ValueError as error:
            if rows and number == lines[-1][0]:
                return Document(None, rows, cut_lines=1)
            raise TraceError(
                f"line {number} is not JSON, nor is the file as a whole", hint=SUPPORTED_HINT
            ) from error
    return Document(None, rows)


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise TraceError("the JSON is nested too deeply", hint=SUPPORTED_HINT) from error
