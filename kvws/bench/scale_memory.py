"""What work takes of the machine's memory."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path
from typing import Self

import psutil

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


class PeakMemory:
    """How much more memory a process holds than when it was entered, at its most.

    What was freed before is given back to the system first, or work that used it again would seem
    to need none.

    Attributes:
        extra_bytes: known when it is left; None where the system does not tell.
    """

    def __init__(self) -> None:
        self.extra_bytes: int | None = None
        self._before_bytes: int | None = None

    def __enter__(self) -> Self:
        _give_back_freed()
        try:
            self._before_bytes = _status_bytes("VmRSS")
            _CLEAR.write_text(_RESET_PEAK)
        except (OSError, KeyError):
            self._before_bytes = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._before_bytes is not None:
            self.extra_bytes = max(0, _status_bytes("VmHWM") - self._before_bytes)


def held_bytes() -> int:
    """Memory that this process holds."""
    return psutil.Process().memory_info().rss


def free_bytes() -> int:
    """Memory that the machine could still give."""
    return psutil.virtual_memory().available


def megabytes(size_bytes: int | None) -> str:
    """For a table."""
    return "–" if size_bytes is None else f"{size_bytes / 1e6:,.0f}"


def _status_bytes(name: str) -> int:
    lines = _STATUS.read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields[name].split()[0]) << 10


def _give_back_freed() -> None:
    with contextlib.suppress(OSError, AttributeError):  # not the GNU C library
        ctypes.CDLL(None).malloc_trim(0)
