"""The report of a replay: totals, JSON and table."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvws.errors import ConfigError
from kvws.limits import Limits
from kvws.observe.step_report import report_to_plain
from kvws.replay.run import ReplayedStep, Resumption
from kvws.replay.trace import Trace


@dataclass(frozen=True)
class Totals:
    """A whole session in a few numbers.

    Attributes:
        steps: steps replayed.
        recall_steps: steps whose session was larger than the view.
        session_tokens: longest prompt of the session.
        prompt_tokens: all prompts added up: what an engine without any cache prefills.
        new_tokens: tokens that were new at their step.
        computed_tokens: prompt tokens that were computed, probes included.
        reuse_ratio: share of prompt_tokens that was not computed.
        recompute_factor: computed_tokens / new_tokens; 1 is the least possible.
        ttft_ms: percentiles of the time to the first token.
        speedup_over_text: per compared step, time to the first token of the same view and query
            as text over that of the recall (the step without what was ingested ahead).
        speedup_median: median of these, or None.
    """

    steps: int
    recall_steps: int
    session_tokens: int
    prompt_tokens: int
    new_tokens: int
    computed_tokens: int
    reuse_ratio: float
    recompute_factor: float
    ttft_ms: dict[str, float]
    speedup_over_text: list[float]
    speedup_median: float | None


def summarise(steps: Sequence[ReplayedStep]) -> Totals:
    """Add up a replay. A session without steps has zeros."""
    prompts = sum(step.report.prompt_tokens for step in steps)
    new = sum(step.report.new_tokens for step in steps)
    computed = sum(step.report.computed_tokens for step in steps)
    speedups = [
        step.cold_text_ms / (step.report.ms.first_token - step.report.ms.ingest)
        for step in steps
        if step.cold_text_ms is not None
    ]
    return Totals(
        steps=len(steps),
        recall_steps=sum(step.report.recalled for step in steps),
        session_tokens=max((step.report.prompt_tokens for step in steps), default=0),
        prompt_tokens=prompts,
        new_tokens=new,
        computed_tokens=computed,
        reuse_ratio=1 - computed / prompts if prompts else 0.0,
        recompute_factor=computed / new if new else 0.0,
        ttft_ms=_percentiles([step.report.ms.first_token for step in steps]),
        speedup_over_text=speedups,
        speedup_median=statistics.median(speedups) if speedups else None,
    )


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    """Nearest-rank percentiles."""
    if not values:
        return {}
    ranked = sorted(values)
    return {
        f"p{percent}": ranked[max(0, -(-percent * len(ranked) // 100) - 1)]
        for percent in (50, 90, 99)
    }


def as_json(
    trace: Trace,
    model: str,
    limits: Limits,
    steps: Sequence[ReplayedStep],
    *,
    skipped_steps: int,
    resumption: Resumption | None,
    token_bytes: Mapping[str, float],
) -> dict[str, Any]:
    """The whole report. Times in milliseconds, sizes in tokens, blocks of 32 tokens, or bytes."""
    return {
        "trace": {"name": trace.name, "format": trace.format, "notes": list(trace.notes)},
        "model": model,
        "limits": asdict(limits),
        "totals": asdict(summarise(steps)),
        "skipped_steps": skipped_steps,
        "resumed": None if resumption is None else asdict(resumption),
        "token_bytes": dict(token_bytes),
        "steps": [step_as_json(step) for step in steps],
    }


def step_as_json(step: ReplayedStep) -> dict[str, Any]:
    """One step of the report."""
    return {
        "number": step.number,
        **report_to_plain(step.report),
        "blocks_total": step.blocks_total,
        "blocks_kept": step.kept,
        "blocks_loaded": step.loaded,
        "blocks_dropped": step.dropped,
        "tier_bytes": None if step.tiers is None else asdict(step.tiers),
        "cold_text_ms": step.cold_text_ms,
        "restored": step.restored,
    }


def require_writable(path: Path, option: str) -> None:
    """Refuse a file that could not be written, before hours of work.

    Raises:
        ConfigError: its folder is missing or read-only, or it is a folder itself.
    """
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(
            f"{path} cannot be written", hint=f"give {option} a file in a folder that exists"
        )


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Write a report whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def print_report(
    console: Console,
    trace: Trace,
    limits: Limits,
    steps: Sequence[ReplayedStep],
    *,
    skipped_steps: int,
    resumption: Resumption | None,
    token_bytes: Mapping[str, float],
) -> None:
    """Table of steps, then the totals in words."""
    console.print(_table(steps, console.width))
    if skipped_steps:
        console.print(f"left out: {skipped_steps} steps with prompts beyond --max-tokens")
    totals = summarise(steps)
    if not steps:
        console.print("no step was replayed")
        return
    console.print(
        f"[bold]{trace.name}[/]: {totals.steps} steps, {totals.session_tokens:,} tokens through a "
        f"view of {limits.budget_tokens:,} "
        f"({totals.session_tokens / limits.budget_tokens:.1f}x its size), "
        f"{totals.recall_steps} recalls"
    )
    console.print(
        f"prompts {totals.prompt_tokens:,} tokens, new {totals.new_tokens:,}, computed "
        f"{totals.computed_tokens:,}: [bold]{totals.reuse_ratio:.1%} reused[/], "
        f"{totals.recompute_factor:.2f}x the new tokens"
    )
    ttft = ", ".join(f"{name} {value:,.0f} ms" for name, value in totals.ttft_ms.items())
    console.print(f"time to first token {ttft}")
    console.print(f"{_where(steps[-1])}, integrity checked after every step")
    if token_bytes:
        sizes = ", ".join(f"{count:,.0f} bytes on {tier}" for tier, count in token_bytes.items())
        console.print(f"a token takes {sizes}")
    if resumption is not None:
        console.print(
            f"resumed: {resumption.steps} steps restored, {resumption.blocks} blocks restored, "
            f"{resumption.recomputed_blocks} acknowledged blocks computed again"
        )
    if totals.speedup_median is not None:
        console.print(
            f"the same views and queries as text, cold: [bold]{totals.speedup_median:.1f}x[/] "
            f"slower than their recall (median of {len(totals.speedup_over_text)})"
        )


def _where(step: ReplayedStep) -> str:
    blocks = f"{step.blocks_total} blocks"
    if step.tiers is None:
        return blocks
    tiers = asdict(step.tiers).items()
    return f"{blocks}: " + ", ".join(f"{name} {_mib(count)}" for name, count in tiers)


def _table(steps: Sequence[ReplayedStep], width: int) -> Table:
    """One row a step; a narrow terminal gets the columns that matter most."""
    columns = {name: cell for name, cell in _COLUMNS.items() if width >= 150 or name in _NARROW}
    table = Table(header_style="bold", padding=(0, 1), box=None)
    for name in columns:
        table.add_column(name, justify="left" if name == "thread" else "right", no_wrap=True)
    for step in steps:
        table.add_row(*(cell(step) for cell in columns.values()))
    table.caption = (
        "tokens: prompt, new, computed; blocks of 32 tokens: kept, loaded, dropped; times in ms"
    )
    return table


def _ms(part: str) -> Callable[[ReplayedStep], str]:
    return lambda step: f"{getattr(step.report.ms, part):,.0f}"


def _blocks(count: Callable[[ReplayedStep], int]) -> Callable[[ReplayedStep], str]:
    """Counts of a selection; a step whose session fits its view selects nothing."""
    return lambda step: str(count(step)) if step.report.recalled else ""


_COLUMNS: dict[str, Callable[[ReplayedStep], str]] = {
    "step": lambda step: str(step.number),
    "thread": lambda step: step.report.thread,
    "prompt": lambda step: str(step.report.prompt_tokens),
    "new": lambda step: str(step.report.new_tokens),
    "computed": lambda step: str(step.report.computed_tokens),
    "kept": _blocks(lambda step: step.kept),
    "loaded": _blocks(lambda step: step.loaded),
    "dropped": _blocks(lambda step: step.dropped),
    "ingest": _ms("ingest"),
    "probe": _ms("probe"),
    "score": _ms("score"),
    "plan": _ms("plan"),
    "stage-in": _ms("stage_in"),
    "prefill": _ms("prefill"),
    "first token": _ms("first_token"),
    "as text": lambda step: "" if step.cold_text_ms is None else f"{step.cold_text_ms:,.0f}",
    "host": lambda step: "" if step.tiers is None else _mib(step.tiers.host),
    "disk": lambda step: "" if step.tiers is None else _mib(step.tiers.disk),
    "device": lambda step: "" if step.tiers is None else _mib(step.tiers.device),
}
_WIDE = {"ingest", "score", "plan", "stage-in", "as text", "disk", "device"}
_NARROW = frozenset(_COLUMNS) - _WIDE


def _mib(count: int) -> str:
    return f"{count / (1 << 20):,.0f}M"
