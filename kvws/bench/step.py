"""The data path of a step in a long session, part by part, without the model.

What the product does between a probe's queries and the answer's first pass runs here as it is:
the log, the selector, the look at all blocks and the close look at some, the plan, the promise,
and the stage-in. Queries, keys and payloads are random; nothing is sent between processes.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

from rich.table import Table

from kvws.bench.scale_memory import PeakMemory, megabytes
from kvws.bench.scale_ranks import READS_CLOSELY, READS_RUNS, IndexAlone
from kvws.bench.scale_session import LongSession
from kvws.bench.stage_in import filled_host, payload_geometry
from kvws.bench.store import StageIn
from kvws.blocks.key import BLOCK_TOKENS
from kvws.choosing import choose, read_new_blocks
from kvws.engine.protocol import Engine
from kvws.looking import Look, Looked, competing
from kvws.recall.plan import plan_view
from kvws.recall.regions import Regions
from kvws.recall.selector import Asked
from kvws.recall.spans import PromptSpans, Span
from kvws.recall.view import ExecutionView, Prompt

PARTS = (
    "read new blocks",
    "text scores",
    "run scores",
    "shortlist",
    "close scores",
    "choose and plan",
    "commit",
    "stage-in",
)
SCORING = ("text scores", "run scores", "shortlist", "close scores")

NEW_BLOCKS = 28
"""Of a step: a tool's result of some 900 tokens."""

_SYSTEM_TOKENS, _TASK_TOKENS = 3000, 300
_HOST_VIEWS = 4
"""Views that the host tier holds to be staged in from."""

_KV_BITS = 32


@dataclass(frozen=True)
class PartTimes:
    """Of several steps of one session.

    Attributes:
        ms, cpu_ms: one entry a step, by part.
        extra_bytes: memory that the steps took beside what they left; None where the system does
            not tell.
    """

    ms: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    cpu_ms: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    extra_bytes: int | None = None

    @contextmanager
    def measure(self, part: str) -> Generator[None]:
        """Add to a part of the latest step."""
        begin, cpu_begin = time.perf_counter(), time.process_time()
        yield
        self.add(part, time.perf_counter() - begin, time.process_time() - cpu_begin)

    def add(self, part: str, seconds: float, cpu_s: float) -> None:
        self.ms[-1][part] += 1e3 * seconds
        self.cpu_ms[-1][part] += 1e3 * cpu_s

    def begin_step(self) -> None:
        self.ms.append(dict.fromkeys(PARTS, 0.0))
        self.cpu_ms.append(dict.fromkeys(PARTS, 0.0))

    def growth(self, smaller: PartTimes, *, cpu: bool = False) -> float:
        """Median of a step's time over that of the smaller session's step taken beside it."""
        return statistics.median(
            sum(step.values()) / sum(other.values())
            for step, other in zip(self._steps(cpu), smaller._steps(cpu), strict=True)
        )

    def _steps(self, cpu: bool) -> list[dict[str, float]]:
        return self.cpu_ms if cpu else self.ms

    def median_ms(self, *parts: str, cpu: bool = False) -> float:
        """Of parts together; all of them without any name."""
        return statistics.median(
            sum(step[part] for part in parts or PARTS) for step in self._steps(cpu)
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "ms": {part: self.median_ms(part) for part in PARTS},
            "cpu_ms": {part: self.median_ms(part, cpu=True) for part in PARTS},
            "all_ms": self.median_ms(),
            "all_cpu_ms": self.median_ms(cpu=True),
            "extra_bytes": self.extra_bytes,
        }


class DataPath:
    """Steps of one session, one after the other.

    Attributes:
        session: that takes them.
    """

    def __init__(
        self, session: LongSession, *, query_tokens: int, staged_blocks: int, seed: int = 7
    ) -> None:
        """`staged_blocks`: that every step stages in from host memory."""
        self.session = session
        self._query_tokens = query_tokens
        self._staged_blocks = staged_blocks
        self._rng = random.Random(seed)  # noqa: S311 (not for secrets)
        geometry = payload_geometry(session.geometry, _KV_BITS)
        host, self._slots = filled_host(geometry, _HOST_VIEWS * staged_blocks)
        self._stage_in = StageIn(host, staged_blocks)

    async def step(self, times: PartTimes, closely_at_most: int) -> None:
        """One more. Mutates `times`."""
        session = self.session
        workspace, thread = session.workspace, session.thread
        new_tokens, new_rows = session.new_tokens(NEW_BLOCKS), session.new_rows(NEW_BLOCKS)
        question = session.turns.words(self._query_tokens)
        queries = session.queries(self._query_tokens)
        times.begin_step()
        with times.measure("commit"):
            aligned = workspace.align([*new_tokens, *question], thread.line)
            assert len(aligned.line) == session.blocks, "the words of a step are new"
            session.index.write(session.register(new_tokens), new_rows)
        with times.measure("read new blocks"):
            await read_new_blocks(workspace)
        with times.measure("choose and plan"):
            asked = self._asked(question)
        ranks = IndexAlone(session.index, queries)
        look = Look(
            engine=cast("Engine", ranks),
            workspace=workspace,
            asked=asked,
            query_first=BLOCK_TOKENS * session.blocks,
            closely_at_most=closely_at_most,
        )
        with times.measure("text scores"):
            known = await look.first()
        begin, cpu_begin = time.perf_counter(), time.process_time()
        looked = await look.with_queries("probe", known)
        took = time.perf_counter() - begin, time.process_time() - cpu_begin
        for part, reads in (("run scores", READS_RUNS), ("close scores", READS_CLOSELY)):
            times.add(part, *ranks.seconds[reads])
        beside = (sum(of_part[clock] for of_part in ranks.seconds.values()) for clock in range(2))
        times.add("shortlist", *(all_ - reads for all_, reads in zip(took, beside, strict=True)))
        with times.measure("choose and plan"):
            view = await self._planned(looked)
        with times.measure("commit"):
            pages = ExecutionView.of_blocks(view)
            prompt = Prompt.compose(pages, question, workspace.namespace, workspace.block_tokens)
            prompt.promised_pages()
            workspace.record(thread, thread.line, view, ())
        self._stage_in.draw(self._rng.sample(self._slots, self._staged_blocks), self._rng)
        with times.measure("stage-in"):
            self._stage_in.fill()

    def _asked(self, question: Sequence[int]) -> Asked:
        """What a view is chosen for: a session with a long system prompt and a short task."""
        session, limits = self.session, self.session.limits
        workspace, thread = session.workspace, session.thread
        line = thread.line
        spans = PromptSpans(
            system=Span(0, _SYSTEM_TOKENS),
            task=Span(_SYSTEM_TOKENS, _SYSTEM_TOKENS + _TASK_TOKENS),
        )
        regions = Regions.of_prompt(
            line,
            spans,
            sink_blocks=limits.sink_blocks,
            recent_blocks=limits.recent_blocks,
            budget_blocks=limits.budget_blocks,
        )
        return Asked(
            line=line,
            question=question,
            own=workspace.selector.content_rows(question),
            regions=regions,
            candidates=competing(regions, line, question, workspace, thread.name),
            in_view=frozenset(thread.view),
            budget_blocks=limits.budget_blocks,
        )

    async def _planned(self, looked: Looked) -> tuple[int, ...]:
        session, limits = self.session, self.session.limits
        choice = await choose(session.workspace, looked.asked, looked.by_signal)
        plan = plan_view(
            current=session.thread.view,
            regions=looked.asked.regions,
            chosen=choice.chosen,
            budget_blocks=limits.budget_blocks,
            room_blocks=limits.budget_blocks,
        )
        return plan.view


async def steps_in_turn(
    paths: Sequence[DataPath], count: int, closely_at_most: int
) -> list[PartTimes]:
    """So many steps of each session, one of each after the other: what else the machine does, and
    how fast it runs just then, reaches all of them alike.

    What is only done once behind a growth is done before.

    Returns:
        of each session; all with the extra memory of all of them.
    """
    for path in paths:
        await path.step(PartTimes(), min(closely_at_most, NEW_BLOCKS))
    found = [PartTimes() for _ in paths]
    with PeakMemory() as memory:
        for _ in range(count):
            for path, times in zip(paths, found, strict=True):
                await path.step(times, closely_at_most)
    return [replace(times, extra_bytes=memory.extra_bytes) for times in found]


def step_table(tokens: int, shortlisted: PartTimes, exact: PartTimes) -> Table:
    """One row a part: with a shortlist, and with a close look at all blocks."""
    table = Table(title=f"{tokens:,} tokens", box=None, header_style="bold")
    table.add_column("part")
    for name in ("ms", "CPU ms", "exact: ms", "exact: CPU ms"):
        table.add_column(name, justify="right")
    for name, parts in (*((part, (part,)) for part in PARTS), ("all", PARTS)):
        table.add_row(
            name,
            *(
                f"{times.median_ms(*parts, cpu=cpu):,.1f}"
                for times in (shortlisted, exact)
                for cpu in (False, True)
            ),
        )
    table.add_row("extra MB", megabytes(shortlisted.extra_bytes), "", megabytes(exact.extra_bytes))
    return table
