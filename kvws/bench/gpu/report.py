"""What a run found: one table for people, one file for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FILE_NAME = "bench_gpu.json"

_HEADINGS = ("", "what", "variant", "check", "of allowed", "ms", "GB/s", "of ceiling", "")
_RIGHT = (4, 5, 6, 7)


@dataclass
class Row:
    """One line.

    Attributes:
        section: "ceiling", "check", "beyond 2³¹", "kernel" or "step".
        passed: of a check; None where nothing was checked.
        share_of_tolerance: the largest deviation over the allowed one.
        ms: median.
        moved_bytes: the least that had to be read and written.
        of_ceiling: share of the bandwidth of the copy that it is compared with.
    """

    section: str
    name: str
    variant: str
    passed: bool | None = None
    share_of_tolerance: float | None = None
    ms: float | None = None
    moved_bytes: int | None = None
    of_ceiling: float | None = None
    note: str = ""

    @property
    def gb_per_s(self) -> float | None:
        if self.ms is None or not self.moved_bytes:
            return None
        return 1e-6 * self.moved_bytes / self.ms

    def took(self, ms: float, moved_bytes: int | None = None) -> None:
        self.ms, self.moved_bytes = ms, moved_bytes

    def compared_with(self, ceiling_gb_per_s: float) -> None:
        if self.gb_per_s is not None and ceiling_gb_per_s:
            self.of_ceiling = self.gb_per_s / ceiling_gb_per_s


@dataclass
class Report:
    """All of a run.

    Attributes:
        machine: what it ran on.
        skipped: what did not run, and why.
    """

    machine: dict[str, Any]
    rows: list[Row] = field(default_factory=list[Row])
    skipped: list[str] = field(default_factory=list[str])

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if row.passed is False]

    def write(self, folder: Path) -> None:
        """Replace the file with what there is up to now."""
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            "machine": self.machine,
            "passed": not self.failed,
            "rows": [{**asdict(row), "gb_per_s": row.gb_per_s} for row in self.rows],
            "skipped": self.skipped,
        }
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        (folder / FILE_NAME).write_text(text, encoding="utf-8")

    def text(self) -> str:
        lines = [*_aligned([_HEADINGS, *map(_cells, self.rows)])]
        lines += [f"skipped: {line}" for line in self.skipped]
        checked = [row for row in self.rows if row.passed is not None]
        lines.append(f"{len(checked) - len(self.failed)} of {len(checked)} checks passed")
        return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    check = "" if row.passed is None else "ok" if row.passed else "FAILED"
    share = row.share_of_tolerance
    return (
        row.section,
        row.name,
        row.variant,
        check,
        "" if share is None else f"{share:.3f}",
        "" if row.ms is None else f"{row.ms:.3f}",
        "" if row.gb_per_s is None else f"{row.gb_per_s:,.1f}",
        "" if row.of_ceiling is None else f"{row.of_ceiling:.0%}",
        row.note,
    )


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for row in rows:
        cells = (
            cell.rjust(width) if place in _RIGHT else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return lines
