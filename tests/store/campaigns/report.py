"""What a campaign hands back, and how it is printed."""

from __future__ import annotations

import argparse
import faulthandler
import sys
import time
from dataclasses import dataclass, field

MAX_SHOWN = 20
MAX_SILENCE_S = 600

_is_command = False
"""Only a campaign's own process is ended. A test runs campaigns in a process that goes on to other
tests, and whatever was set there for one of them would end it in the middle of another."""


@dataclass
class Report:
    """Counts and violations of one campaign.

    Attributes:
        unit: what `rate` counts: the key of one of the counts.
    """

    name: str
    seed: int
    unit: str
    counts: dict[str, int] = field(default_factory=dict[str, int])
    violations: list[str] = field(default_factory=list[str])
    started_s: float = field(default_factory=time.monotonic)
    started_cpu_s: float = field(default_factory=time.process_time)

    def count(self, what: str, number: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + number

    def __str__(self) -> str:
        seconds = time.monotonic() - self.started_s
        cpu_s = time.process_time() - self.started_cpu_s
        units = self.counts.get(self.unit, 0)
        counts = ", ".join(f"{number:,} {what}" for what, number in self.counts.items())
        shown = [f"  VIOLATION {text}" for text in self.violations[:MAX_SHOWN]]
        head = (
            f"{self.name}: seed {self.seed}: {counts}; {len(self.violations)} violations; "
            f"{seconds:.1f} s, {units / seconds:,.0f} {self.unit}/s, {cpu_s:.1f} s of CPU"
        )
        return "\n".join([head, *shown])


def arguments(name: str, **options: int) -> argparse.Namespace:
    """Parse a campaign's command line; every option is a number with a default, `seed` always is.

    From here on this is a campaign's process: if it hangs it is ended, with a traceback.
    """
    global _is_command
    _is_command = True
    parser = argparse.ArgumentParser(prog=f"scripts/crash {name}")
    parser.add_argument("--seed", type=int, default=1)
    for option, default in options.items():
        parser.add_argument("--" + option.replace("_", "-"), type=int, default=default)
    return parser.parse_args()


def finish(report: Report) -> None:
    """Print the report; the process fails when there are violations."""
    print(report, flush=True)
    sys.exit(1 if report.violations else 0)


def end_when_stuck() -> None:
    """Call it with every step forward: without one for `MAX_SILENCE_S` a command ends."""
    if not _is_command:
        return
    faulthandler.dump_traceback_later(MAX_SILENCE_S, exit=True)
