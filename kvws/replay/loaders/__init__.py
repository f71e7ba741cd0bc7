"""Recorded sessions of several agents, read into one `Trace`.

A file's contents decide its format, never its name. One module per format; each offers
`FORMAT`, `recognises(document)` and `load(document, name)`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from kvws.errors import TraceError
from kvws.replay.loaders import (
    claude_code,
    kvws_record,
    mini_swe_agent,
    openai_chat,
    openhands,
    swe_agent,
)
from kvws.replay.loaders.source import (
    SUPPORTED_HINT,
    Document,
    decompress,
    parse_document,
    read_bounded,
)
from kvws.replay.trace import Trace

__all__ = ["load_trace", "parse_trace"]


class _Loader(Protocol):
    def recognises(self, document: Document) -> bool: ...

    def load(self, document: Document, name: str) -> Trace: ...


# The more specific first: a mini-swe-agent trajectory is also a chat log.
_LOADERS: tuple[_Loader, ...] = (
    kvws_record,
    claude_code,
    mini_swe_agent,
    swe_agent,
    openhands,
    openai_chat,
)
_SUFFIXES = (".xz", ".gz", ".json", ".jsonl", ".traj")


def load_trace(path: str | Path) -> Trace:
    """Read a recorded session.

    Raises:
        TraceError: the file is missing, damaged, of no known format, or holds no model call.
    """
    path = Path(path)
    return _load(read_bounded(path), _trace_name(path))


def parse_trace(data: bytes, name: str = "trace") -> Trace:
    """Read a recorded session from bytes, compressed or not.

    Raises:
        TraceError: as `load_trace`.
    """
    return _load(decompress(data), name)


def _load(data: bytes, name: str) -> Trace:
    document = parse_document(data)
    loader = next((loader for loader in _LOADERS if loader.recognises(document)), None)
    if loader is None:
        raise TraceError("the trace's format is not known", hint=SUPPORTED_HINT)
    try:
        trace = loader.load(document, name)
    except RecursionError as error:
        raise TraceError("the JSON is nested too deeply", hint=SUPPORTED_HINT) from error
    if not trace.steps:
        raise TraceError(
            f"the {trace.format} trace holds no assistant turn that answers something",
            hint="record at least one model call; " + SUPPORTED_HINT,
        )
    return trace


def _trace_name(path: Path) -> str:
    name = path.name
    while (suffix := Path(name).suffix) in _SUFFIXES:
        name = name.removesuffix(suffix)
    return name
