"""How an engine process that refuses to start tells the front process why."""

from __future__ import annotations

from pathlib import Path

import kvws.errors
from kvws.engine import wire
from kvws.errors import EngineStartError, KvwsError

_FILE = "startup-error.msgpack"


def report_startup_error(control_dir: Path, error: KvwsError) -> None:
    """Leave the reason in the control directory; the first reason wins."""
    target = control_dir / _FILE
    if not target.exists():
        reason = {
            "kind": type(error).__name__,
            "message": str(error.args[0]),
            "hint": error.hint,
        }
        target.write_bytes(wire.pack(reason))


def read_startup_error(control_dir: Path) -> KvwsError | None:
    """The reason an engine process left, as the error it was."""
    source = control_dir / _FILE
    if not source.exists():
        return None
    reason = wire.unpack(source.read_bytes())
    kind = getattr(kvws.errors, reason["kind"], EngineStartError)
    return kind(reason["message"], hint=reason["hint"])
