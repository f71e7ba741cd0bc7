"""What one step did, in counts and milliseconds."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from kvws.recall.plan import Action, Decision
from kvws.recall.recipe import SignalName
from kvws.recall.regions import Reason


@dataclass
class Timings:
    """Wall milliseconds of a step's parts. `stage_in` overlaps `prefill` and `ingest`."""

    ingest: float = 0.0
    probe: float = 0.0
    score: float = 0.0
    plan: float = 0.0
    commit: float = 0.0
    stage_in: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    register: float = 0.0
    first_token: float = 0.0

    @contextmanager
    def measure(self, part: str) -> Generator[None]:
        """Add the time of a block to a part."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, part, getattr(self, part) + 1e3 * (time.perf_counter() - begin))


@dataclass
class StepReport:
    """One agent step.

    Attributes:
        thread: name of the thread.
        prompt_tokens: length of the client's whole prompt.
        new_tokens: tokens of it that were not in the log as blocks when the step first began.
        resumed_tokens: those of them that an attempt which never ended had left as blocks.
        query_tokens: those of them that the answer was asked with, behind the view.
        computed_tokens: prompt tokens the engine computed, over all its passes, those of
            `resumed_tokens` included.
        generated_tokens: tokens decoded.
        view_blocks: blocks of the execution view.
        recalled: whether a selection took place (otherwise everything fitted).
        unchanged: the selection left the view as it was.
        scored_blocks: blocks whose keys were looked at closely, of recall steps; of a long session
            those of a shortlist.
        passes: engine requests made.
        retries: times the step began anew after a lost block or a poisoned view.
        repaired_blocks: lost blocks whose tokens were prefilled again.
        recomputed_acknowledged_blocks: blocks computed again although an earlier life of the
            workspace had acknowledged them as durable.
        loaded_pages: pages staged in from the host tier.
        decisions: fate of each block, of recall steps.
        signals: names of those that had anything to say about the blocks, of recall steps.
        shrunk: parts of the prompt that the view should hold whole and that did not fit, by the
            reason that their other blocks have, with the number of blocks left to compete.
        ms: wall times.
    """

    thread: str
    prompt_tokens: int = 0
    new_tokens: int = 0
    resumed_tokens: int = 0
    query_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    view_blocks: int = 0
    recalled: bool = False
    unchanged: bool = False
    scored_blocks: int = 0
    passes: int = 0
    retries: int = 0
    repaired_blocks: int = 0
    recomputed_acknowledged_blocks: int = 0
    loaded_pages: int = 0
    decisions: tuple[Decision, ...] = ()
    signals: tuple[str, ...] = ()
    shrunk: dict[str, int] = field(default_factory=dict[str, int])
    ms: Timings = field(default_factory=Timings)


def report_to_plain(report: StepReport) -> dict[str, Any]:
    """A report as JSON takes it; decisions as [block, action, reason, score, signal, ranks]."""
    plain = {each.name: getattr(report, each.name) for each in fields(StepReport)}
    plain["decisions"] = [_decision_to_plain(decision) for decision in report.decisions]
    plain["signals"] = list(report.signals)
    plain["shrunk"] = dict(report.shrunk)
    plain["ms"] = asdict(report.ms)
    return plain


def report_from_plain(plain: Mapping[str, Any]) -> StepReport:
    """The report that `report_to_plain` was given. Counts it does not name are 0; decisions may
    end behind their score.

    Raises:
        ValueError, TypeError, AttributeError: it is no report.
    """
    counts = {
        each.name: plain[each.name]
        for each in fields(StepReport)
        if each.name in plain and each.name not in _NO_COUNTS
    }
    if not isinstance(plain.get("thread"), str) or not _are_numbers(counts):
        raise ValueError("a report without a thread or with a count that is none")
    times = plain.get("ms", {})
    ms = {part.name: times[part.name] for part in fields(Timings) if part.name in times}
    if not _are_numbers(ms):
        raise ValueError("a report with a time that is none")
    shrunk = dict(plain.get("shrunk", {}))
    if not _are_numbers(shrunk):
        raise ValueError("a report with a count of blocks that is none")
    return StepReport(
        plain["thread"],
        **counts,
        decisions=tuple(_decision_from_plain(*each) for each in plain.get("decisions", ())),
        signals=tuple(SignalName(name).value for name in plain.get("signals", ())),
        shrunk=shrunk,
        ms=Timings(**ms),
    )


_NO_COUNTS = {"thread", "decisions", "signals", "shrunk", "ms"}


def _decision_to_plain(decision: Decision) -> list[Any]:
    return [
        decision.block,
        decision.action.value,
        decision.reason.value,
        decision.score,
        decision.signal.value if decision.signal is not None else None,
        {signal.value: rank for signal, rank in decision.ranks.items()},
    ]


def _decision_from_plain(
    block: int,
    action: str,
    reason: str,
    score: float | None,
    signal: str | None = None,
    ranks: Mapping[str, int] | None = None,
) -> Decision:
    by_signal = {SignalName(name): rank for name, rank in (ranks or {}).items()}
    if not _are_numbers(by_signal):
        raise ValueError("a decision with a rank that is none")
    loudest = SignalName(signal) if signal is not None else None
    return Decision(block, Action(action), Reason(reason), score, loudest, by_signal)


def _are_numbers(values: Mapping[Any, Any]) -> bool:
    return all(isinstance(value, int | float) for value in values.values())
