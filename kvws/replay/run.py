"""Replaying a recorded session, step by step, through a workspace on a real engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from kvws.engine.protocol import Engine
from kvws.limits import Limits
from kvws.observe.step_report import StepReport
from kvws.recall.plan import Action
from kvws.replay.baselines import cold_text_ms
from kvws.replay.render import ChatRenderer
from kvws.replay.trace import Trace
from kvws.session.workspace import Workspace
from kvws.step import StepRequest, finish_step, run_step


@dataclass(frozen=True)
class ReplayOptions:
    """What is replayed, and what it is compared with.

    Attributes:
        max_steps: stop after so many steps; 0 for all.
        max_tokens: leave out steps whose prompt is longer; 0 for none.
        generate_tokens: decode so many tokens a step; the recorded answer is what the session
            goes on with in any case.
        compare_every: for every n-th recall step, prefill the same view as text, nothing cached;
            0 for never.
    """

    max_steps: int = 0
    max_tokens: int = 0
    generate_tokens: int = 0
    compare_every: int = 0


@dataclass(frozen=True)
class TierBytes:
    """Bytes of KV on each tier after a step. The disk tier does not exist yet: always 0."""

    device: int
    host: int
    disk: int = 0


@dataclass
class ReplayedStep:
    """One step of the session.

    Attributes:
        number: from 1, over all threads.
        report: what the step did.
        blocks_total: blocks of the workspace after it.
        tiers: bytes on each tier after it.
        cold_text_ms: time to the first token of the same view and query as text, where compared.
    """

    number: int
    report: StepReport
    blocks_total: int
    tiers: TierBytes
    cold_text_ms: float | None = None

    @property
    def kept(self) -> int:
        return self._count(Action.KEEP)

    @property
    def loaded(self) -> int:
        return self._count(Action.LOAD)

    @property
    def dropped(self) -> int:
        return self._count(Action.DROP)

    def _count(self, action: Action) -> int:
        return sum(decision.action is action for decision in self.report.decisions)


@dataclass
class SessionReplay:
    """A trace being replayed in a workspace of its own."""

    trace: Trace
    renderer: ChatRenderer
    engine: Engine
    limits: Limits
    options: ReplayOptions
    workspace: Workspace = field(init=False)
    skipped_steps: int = 0

    def __post_init__(self) -> None:
        self.workspace = Workspace(f"replay-{self.trace.name}")

    @property
    def planned_steps(self) -> int:
        """Steps that will be tried."""
        steps = len(self.trace.steps)
        return min(steps, self.options.max_steps) if self.options.max_steps else steps

    async def steps(self) -> AsyncGenerator[ReplayedStep, None]:
        """Run the session, yielding each step as it ends.

        The integrity equations of workspace and ranks are checked after every step.
        """
        number = 0
        recalls = 0
        for step in self.trace.steps[: self.planned_steps]:
            prompt = self.renderer.tokens(self.trace.context(step), self.trace.tools)
            if self.options.max_tokens and len(prompt) > self.options.max_tokens:
                self.skipped_steps += 1
                continue
            number += 1
            report = await self._run(step.thread, prompt)
            self.workspace.check_integrity()
            await self.engine.check_integrity()
            replayed = ReplayedStep(
                number, report, self.workspace.block_count, await self._tier_bytes()
            )
            recalls += report.recalled
            due = self.options.compare_every
            if report.recalled and due and (recalls - 1) % due == 0:
                replayed.cold_text_ms = await self._same_view_as_text(step.thread, prompt, report)
            yield replayed

    async def _run(self, thread: str, prompt: list[int]) -> StepReport:
        request = StepRequest(
            thread=thread,
            token_ids=prompt,
            max_new_tokens=max(1, self.options.generate_tokens),
            keep_generated=False,
            sampling={"temperature": 0.0, "ignore_eos": True},
        )
        return await finish_step(run_step(request, self.workspace, self.engine, self.limits))

    async def _tier_bytes(self) -> TierBytes:
        stats = await self.engine.stats()
        return TierBytes(
            device=sum(rank["device_used_bytes"] for rank in stats),
            host=sum(rank["host_used_bytes"] for rank in stats),
        )

    async def _same_view_as_text(
        self, thread: str, prompt: list[int], report: StepReport
    ) -> float:
        """The view of the step and its query, prefilled without any cache."""
        view = self.workspace.threads[thread].view[: report.view_blocks]
        query = prompt[len(prompt) - report.query_tokens :]
        return await cold_text_ms(self.engine, [*self.workspace.tokens_of(view), *query])
