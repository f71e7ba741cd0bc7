"""Replaying a recorded session, step by step, through a workspace on a real engine."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, dataclass

from kvws.blocks.key import BLOCK_TOKENS
from kvws.chat.render import ChatRenderer
from kvws.engine.protocol import Engine
from kvws.errors import ConfigError
from kvws.limits import Limits
from kvws.observe.step_report import StepReport
from kvws.recall.plan import Action
from kvws.recall.recipe import Recipe
from kvws.recall.selector import Selector
from kvws.replay.baselines import cold_text_ms
from kvws.replay.trace import Trace
from kvws.session.commit import Commit
from kvws.session.durable import open_workspace
from kvws.session.restore import Restored
from kvws.session.workspace import Workspace
from kvws.step import StepRequest, finish_step, run_step
from kvws.store.directory import StoreDirectory
from kvws.store.identity import ModelIdentity

_log = logging.getLogger("kvws.replay")


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

    def planned_steps(self, trace: Trace) -> int:
        """Steps of a trace that will be tried."""
        steps = len(trace.steps)
        return min(steps, self.max_steps) if self.max_steps else steps


@dataclass(frozen=True)
class TierBytes:
    """Bytes of KV on each tier after a step."""

    device: int
    host: int
    disk: int


@dataclass
class ReplayedStep:
    """One step of the session.

    Attributes:
        number: from 1, over all threads.
        index: of the step in the trace, whose steps may be left out.
        report: what the step did.
        blocks_total: blocks of the workspace after it.
        tiers: bytes on each tier after it; None if the process ended before it could say.
        cold_text_ms: time to the first token of the same view and query as text, where compared.
        restored: it ran in an earlier life of the replay.
    """

    number: int
    index: int
    report: StepReport
    blocks_total: int
    tiers: TierBytes | None
    cold_text_ms: float | None = None
    restored: bool = False

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


@dataclass(frozen=True)
class Resumption:
    """What a resumed replay owes to its earlier lives.

    Attributes:
        steps: steps that did not run again.
        blocks: blocks that came back with their bytes.
        recomputed_blocks: blocks that had been acknowledged as durable and were computed again
            all the same: 0, or a promise was broken.
    """

    steps: int
    blocks: int
    recomputed_blocks: int


@dataclass
class SessionReplay:
    """A trace being replayed in a workspace of its own.

    Attributes:
        restored: what the workspace's earlier lives left.
        skipped_steps: steps left out so far.
    """

    trace: Trace
    renderer: ChatRenderer
    engine: Engine
    limits: Limits
    options: ReplayOptions
    workspace: Workspace
    restored: Restored
    skipped_steps: int = 0
    _disk_paused: bool = False

    @classmethod
    async def open(
        cls,
        trace: Trace,
        renderer: ChatRenderer,
        engine: Engine,
        limits: Limits,
        options: ReplayOptions,
        *,
        selector: Selector,
        name: str,
        store: StoreDirectory | None,
        identity: ModelIdentity,
        resume: bool,
    ) -> SessionReplay:
        """Begin a replay in the workspace `name`, or go on with it.

        Raises:
            ConfigError: it has steps already, and `resume` is not set.
            StoreError: it cannot be opened.
        """
        workspace, restored = await open_workspace(name, engine, store, identity)
        workspace.selector = selector
        if restored.steps and not resume:
            await workspace.journal.close()
            raise ConfigError(
                f"{len(restored.steps)} steps of this replay are stored as {name}",
                hint=f"go on with --resume, or begin anew after `kvws sessions rm {name}`",
            )
        return cls(trace, renderer, engine, limits, options, workspace, restored)

    @property
    def planned_steps(self) -> int:
        """Steps that will be tried."""
        return self.options.planned_steps(self.trace)

    def resumption(self, steps: Sequence[ReplayedStep]) -> Resumption | None:
        """What `steps` owe to earlier lives; None if there were none."""
        if not self.restored.steps and not self.restored.blocks:
            return None
        again = sum(step.report.recomputed_acknowledged_blocks for step in steps)
        return Resumption(sum(step.restored for step in steps), self.restored.blocks, again)

    async def steps(self) -> AsyncGenerator[ReplayedStep, None]:
        """Run the session, yielding each step as it ends; those that are stored come first.

        The integrity equations of workspace and ranks are checked after every step.
        """
        number = 0
        recalls = 0
        stored = self._stored_steps()
        for index, step in enumerate(self.trace.steps[: self.planned_steps]):
            if index in stored:
                number += 1
                replayed = stored[index]
                replayed.number = number
                recalls += replayed.report.recalled
                yield replayed
                continue
            prompt = self.renderer.tokens(self.trace.context(step), self.trace.tools)
            if self.options.max_tokens and len(prompt) > self.options.max_tokens:
                self.skipped_steps += 1
                continue
            stored = {}  # what follows a step that must run again, runs again
            number += 1
            report = await self._run(step.thread, prompt, index)
            self.workspace.check_integrity()
            await self.engine.check_integrity()
            replayed = ReplayedStep(
                number,
                index,
                report,
                self.workspace.registered_blocks,
                await self._tier_bytes(),
            )
            recalls += report.recalled
            due = self.options.compare_every
            if report.recalled and due and (recalls - 1) % due == 0:
                replayed.cold_text_ms = await self._same_view_as_text(step.thread, prompt, report)
            await self._store_measured(index, replayed)
            yield replayed

    def _stored_steps(self) -> dict[int, ReplayedStep]:
        """Steps of earlier lives by their index in the trace."""
        measured = {note["step"]: note for note in self.restored.notes}
        steps: dict[int, ReplayedStep] = {}
        for record in self.restored.steps:
            index: int = record.note["step"]
            note = measured.get(index)
            steps[index] = ReplayedStep(
                number=0,
                index=index,
                report=record.report,
                blocks_total=record.blocks,
                tiers=TierBytes(**note["tiers"]) if note else None,
                cold_text_ms=note["cold_text_ms"] if note else None,
                restored=True,
            )
        return steps

    async def _store_measured(self, index: int, replayed: ReplayedStep) -> None:
        """Keep what is known of a step only after its own commit."""
        assert replayed.tiers is not None
        note = {
            "step": index,
            "tiers": asdict(replayed.tiers),
            "cold_text_ms": replayed.cold_text_ms,
        }
        self.workspace.journal.append(Commit(note=note))
        await self.workspace.journal.written()

    def question(self, step: ReplayedStep) -> list[int]:
        """The tokens that a step's answer was asked with, behind its view."""
        context = self.trace.context(self.trace.steps[step.index])
        prompt = self.renderer.tokens(context, self.trace.tools)
        return prompt[len(prompt) - step.report.query_tokens :]

    async def _run(self, thread: str, prompt: list[int], index: int) -> StepReport:
        request = StepRequest(
            thread=thread,
            token_ids=prompt,
            max_new_tokens=max(1, self.options.generate_tokens),
            keep_generated=False,
            sampling={"temperature": 0.0, "ignore_eos": True},
            note={"step": index},
        )
        return await finish_step(run_step(request, self.workspace, self.engine, self.limits))

    async def _tier_bytes(self) -> TierBytes:
        stats = await self.engine.stats()
        paused = any(rank.get("disk_paused", 0) for rank in stats)
        if paused != self._disk_paused:
            self._disk_paused = paused
            _log.warning(
                "the disk tier is paused: full or failing; the replay goes on without it"
                if paused
                else "the disk tier takes blocks again"
            )
        return TierBytes(
            device=sum(rank["device_used_bytes"] for rank in stats),
            host=sum(rank["host_used_bytes"] for rank in stats),
            disk=sum(rank.get("disk_used_bytes", 0) for rank in stats),
        )

    async def token_bytes(self) -> dict[str, float]:
        """Bytes of KV that a token takes on each tier below the device, over all ranks."""
        stats = await self.engine.stats()
        found: dict[str, float] = {}
        for tier in ("host", "disk"):
            block_bytes = sum(rank.get(f"{tier}_block_bytes", 0) for rank in stats)
            if block_bytes:
                found[tier] = block_bytes / BLOCK_TOKENS
        return found

    async def _same_view_as_text(
        self, thread: str, prompt: list[int], report: StepReport
    ) -> float:
        """The view of the step and its query, prefilled without any cache."""
        view = self.workspace.threads[thread].view[: report.view_blocks]
        query = prompt[len(prompt) - report.query_tokens :]
        return await cold_text_ms(self.engine, [*self.workspace.tokens_of(view), *query])


def workspace_name(
    trace: Trace,
    trace_bytes: bytes,
    model: str,
    limits: Limits,
    options: ReplayOptions,
    recipe: Recipe,
) -> str:
    """A name that only a replay has which would do the same steps.

    Args:
        trace_bytes: the trace's file.
    """
    decides = (model, limits, options.max_tokens, options.generate_tokens, recipe)
    digest = hashlib.blake2b(repr(decides).encode() + trace_bytes, digest_size=6).hexdigest()
    readable = "".join(letter if letter.isprintable() else "_" for letter in trace.name[:200])
    return f"replay-{readable}-{digest}"
