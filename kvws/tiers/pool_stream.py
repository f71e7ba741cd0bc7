"""The order of what several threads do on the pool's device.

On a GPU, work is only queued when it is called, and runs in the order of its stream: the forward
pass has one, the loading thread another. On a CPU it is done when it is called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from typing import Protocol

import torch


class Mark(Protocol):
    """A place in a stream's order: what was queued before it."""

    def wait(self) -> None:
        """Let what this thread queues from here on run behind it."""
        ...


class PoolStream:
    """The loading thread's stream on the pool's device."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def queues(self) -> bool:
        """Whether work is queued there, so that it has an order."""
        return self._stream is not None

    def mark(self) -> Mark | None:
        """Where the calling thread's own stream is now."""
        if self._stream is None:
            return None
        mark = torch.cuda.Event()
        mark.record()
        return mark

    @contextlib.contextmanager
    def behind(self, marks: Iterable[Mark | None]) -> Generator[None]:
        """What is queued while it is entered runs behind the marks; all of it is done at the end,
        also of an error."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            for mark in marks:
                if mark is not None:
                    mark.wait()
            try:
                yield
            finally:
                self.finish()

    def finish(self) -> None:
        """Wait until what was queued is done."""
        if self._stream is not None:
            self._stream.synchronize()
