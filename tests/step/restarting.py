"""A session that is killed after any of its commits, and goes on on a new engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvws.observe.step_report import StepReport
from kvws.session.durable import Acknowledgement, reopen
from kvws.session.restore import Restored
from kvws.session.workspace import Workspace
from tests.step.session import LIMITS, Session, text
from tests.step.simulated_engine import SimulatedEngine
from tests.store.simulated_disk import SimulatedDisk

Place = tuple[int, ...]
"""A block by all tokens up to its end: what it is, whatever its number."""


@dataclass(frozen=True)
class Turn:
    thread: str
    prompt: tuple[int, ...]


def story(seed: int) -> list[Turn]:
    """Two agents beyond the budget: long ingests, changing topics, short questions, an edit."""
    rng = random.Random(seed)
    system = text(0, 2, rng)
    main = system + text(1, 14.3, rng)
    sub = system + text(5, 4.2, rng)
    turns = [Turn("main", tuple(main))]

    def grow(thread: str, prompt: list[int], topic: int, blocks: float) -> None:
        prompt += text(topic, blocks, rng)
        turns.append(Turn(thread, tuple(prompt)))

    grow("main", main, 1, 0.4)
    grow("main", main, 1, 0.3)
    grow("sub", sub, 5, 8)
    grow("main", main, 2, 7.6)
    grow("main", main, 5, 1.2)
    del main[20 * 32 + 7 :]
    grow("main", main, 1, 5)
    grow("main", main, 2, 0.6)
    return turns


def decisions_of(
    report: StepReport, workspace: Workspace
) -> list[tuple[Place, str, str, float | None]]:
    return [
        (place_of(d.block, workspace), d.action.value, d.reason.value, d.score)
        for d in report.decisions
    ]


def counts_of(report: StepReport) -> dict[str, Any]:
    """What does not depend on where the step was interrupted."""
    names = (
        "thread", "prompt_tokens", "new_tokens", "query_tokens", "computed_tokens",
        "generated_tokens", "view_blocks", "recalled", "unchanged",
    )  # fmt: skip
    return {name: getattr(report, name) for name in names}


def place_of(block: int, workspace: Workspace) -> Place:
    return tuple(workspace.tokens_of([*workspace.lineage(block), block]))


def state_of(workspace: Workspace) -> dict[str, Any]:
    """Everything that later steps depend on, and every block."""
    blocks = [n for n in range(workspace.block_count) if workspace.exists(n)]
    places = {n: place_of(n, workspace) for n in blocks}
    return {
        "blocks": set(places.values()),
        "order": [places[n] for n in blocks],
        "threads": {
            name: (
                [places[n] for n in thread.line],
                [places[n] for n in thread.view],
                thread.kept_last_view,
            )
            for name, thread in workspace.threads.items()
        },
    }


@dataclass
class Life:
    """One process: an engine, a workspace and what it did."""

    session: Session
    restored: Restored
    replies: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    reports: list[StepReport] = field(default_factory=list[StepReport])

    @classmethod
    async def begin(cls, engine: SimulatedEngine, folder: Path) -> Life:
        workspace, restored = await reopen("w", engine, folder)
        reports = [step.report for step in restored.steps]
        return cls(Session(engine, workspace, LIMITS), restored, reports=reports)

    async def play(self, turns: Sequence[Turn]) -> None:
        """The turns that are not behind it yet."""
        for number, turn in enumerate(turns):
            if number < len(self.reports):
                continue
            reply = await self.session.ask_and_check(
                turn.prompt, thread=turn.thread, max_new_tokens=2, keep_generated=False
            )
            self.replies[number] = reply.tokens
            self.reports.append(reply.report)

    async def end(self) -> None:
        assert await self.acknowledgement.complete()
        await self.session.workspace.journal.close()

    @property
    def acknowledgement(self) -> Acknowledgement:
        return Acknowledgement(self.session.workspace, self.session.engine)


class Reference:
    """The story told once without interruption, and what it left on disk."""

    def __init__(self, turns: list[Turn], life: Life, disk: SimulatedDisk, log: bytes) -> None:
        self.turns = turns
        self.life = life
        self.disk = disk
        self.log = log
        self.blocks = life.session.workspace.block_count

    @classmethod
    async def tell(cls, turns: list[Turn], folder: Path) -> Reference:
        disk = SimulatedDisk()
        make_directories(disk, folder)
        engine = SimulatedEngine(context_tokens=LIMITS.context_tokens, storage=disk)
        life = await Life.begin(engine, folder)
        await life.play(turns)
        await life.end()
        engine.plane.close()
        return cls(turns, life, disk, (folder / "session.log").read_bytes())

    async def after_a_kill(self, folder: Path, log_bytes: int, held_blocks: int) -> Life:
        """A new life on the first bytes of the log and the first blocks of the rank."""
        engine = self.life.session.engine.restarted(storage=self.disk.kill())
        # Numbers that this life gives out anew must not be taken for the reference's.
        engine._truth = dict(engine._truth)
        engine._versions = {key: list(held) for key, held in engine._versions.items()}
        return await begin_after_kill(folder, self.log[:log_bytes], engine, held_blocks)

    def assert_same_end(self, other: Life) -> None:
        """The other life tells the same story: decisions, answers, and the state behind them."""
        mine, theirs = self.life.session.workspace, other.session.workspace
        assert len(other.reports) == len(self.life.reports)
        for number, (expected, report) in enumerate(
            zip(self.life.reports, other.reports, strict=True)
        ):
            assert decisions_of(report, theirs) == decisions_of(expected, mine), number
            assert counts_of(report) == counts_of(expected), number
        for number, tokens in other.replies.items():
            assert tokens == self.life.replies[number], number
        assert state_of(theirs) == state_of(mine)


async def begin_after_kill(
    folder: Path, log: bytes, engine: SimulatedEngine, held_blocks: int
) -> Life:
    """A new life on that log and the first blocks of what the rank has."""
    (folder / "session.log").write_bytes(log)
    attach = engine.attach

    async def attach_what_is_held(workspace: str, directory: str) -> frozenset[int]:
        held = await attach(workspace, directory)
        engine.plane.forget(workspace, [n for n in held if n >= held_blocks])
        return frozenset(n for n in held if n < held_blocks)

    engine.attach = attach_what_is_held  # type: ignore[method-assign]
    return await Life.begin(engine, folder)


def make_directories(disk: SimulatedDisk, folder: Path) -> None:
    for path in (*reversed(folder.parents), folder):
        if not disk.exists(path):
            disk.make_directory(path)
