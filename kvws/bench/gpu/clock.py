"""Times of work on a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from kvws.bench.gpu.budget import Budget

REPETITIONS = 20

_FLUSHED_BYTES = 1 << 30
"""Written before every run: many times any L2 cache, so that the run reads from memory; and it
takes longer than the CPU needs to launch most runs, so that no gap before it is measured."""


class TooSlowError(Exception):
    """So many repetitions do not fit in the time that is left."""


class Clock:
    """Medians of repeated runs, each with a cold L2 cache."""

    def __init__(self, device: torch.device, budget: Budget) -> None:
        self.device = device
        self._budget = budget
        self._flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device=device)

    def device_ms(self, run: Callable[[], object]) -> float:
        """Between two events around the run, on the current stream.

        Raises:
            TooSlowError: see there.
        """
        self._warm_up(run)
        pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        for _ in range(REPETITIONS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flushed.zero_()
            begin.record()
            run()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize(self.device)
        return statistics.median(begin.elapsed_time(end) for begin, end in pairs)

    def wall_ms(self, run: Callable[[], object]) -> float:
        """From an idle device to an idle device, the CPU's share included.

        Raises:
            TooSlowError: see there.
        """
        self._warm_up(run)
        return statistics.median(self._wall_ms(run) for _ in range(REPETITIONS))

    def _warm_up(self, run: Callable[[], object]) -> None:
        """The first run compiles, the second tells how long the others will take."""
        self._wall_ms(run)
        once_s = 1e-3 * self._wall_ms(run)
        if not self._budget.allows(1.2 * once_s * REPETITIONS):
            raise TooSlowError(
                f"one run takes {once_s:.2f} s, and {self._budget.left_s:.0f} s are left"
            )

    def _wall_ms(self, run: Callable[[], object]) -> float:
        self._flushed.zero_()
        torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize(self.device)
        return 1e3 * (time.perf_counter() - begin)
