"""The time that a run may take, kept by the run itself."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

EXIT_OUT_OF_TIME = 3

_LAST_SECONDS = 5.0
"""Kept free for writing down what there is."""


class Budget:
    """Seconds from its making on."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()

    def allows(self, seconds: float) -> bool:
        """Whether something that may take so long can still begin."""
        return self.left_s - _LAST_SECONDS >= seconds

    def end_process_when_spent(self, last_words: Callable[[], None]) -> Callable[[], None]:
        """A kernel that never returns cannot be interrupted: the process ends beside it.

        Returns:
            calls it off.
        """

        def stop() -> None:
            last_words()
            os._exit(EXIT_OUT_OF_TIME)

        timer = threading.Timer(max(0.0, self.left_s - _LAST_SECONDS / 2), stop)
        timer.daemon = True
        timer.start()
        return timer.cancel
