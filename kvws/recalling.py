"""Recall: probe the query, score all blocks, plan the next view, and ask behind it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from kvws.engine.protocol import Chunk, Engine, Scores
from kvws.errors import SelfCheckFailed
from kvws.limits import Limits
from kvws.observe.step_report import StepReport
from kvws.prefill import EngineStep
from kvws.recall.plan import Regions, plan_view
from kvws.recall.view import Prompt
from kvws.session.ingest import current_view, window
from kvws.session.workspace import Thread, Workspace

Answer = AsyncGenerator[Chunk, None]


@dataclass(frozen=True)
class Recalled:
    """A question asked behind a selected view.

    Attributes:
        prompt: view and question.
        answer: its stream.
        view: blocks of the view.
        near_misses: blocks that may be selected next, the likeliest first.
    """

    prompt: Prompt
    answer: Answer
    view: tuple[int, ...]
    near_misses: tuple[int, ...]


@dataclass(frozen=True)
class Question:
    """The tokens that a step asks behind its view, and how they are to be answered.

    `max_new_tokens`, `sampling` and `logprob_token_ids`: as in `StepRequest`.
    """

    step: EngineStep
    tokens: Sequence[int]
    limits: Limits
    max_new_tokens: int
    sampling: Mapping[str, Any]
    logprob_token_ids: Sequence[int] | None

    @property
    def room_blocks(self) -> int:
        """Blocks of the largest view that the question and its answer fit behind."""
        answer_tokens = self.limits.answer_tokens(self.max_new_tokens)
        return self.limits.room_blocks(len(self.tokens) + answer_tokens)

    def ask(self, prompt: Prompt, *, attempt: str = "answer") -> Answer:
        """Generate, as far as the context allows."""
        room = self.limits.generation_tokens(len(prompt.token_ids))
        return self.step.run(
            prompt,
            rid=f"{self.step.id}.{attempt}",
            max_new_tokens=max(1, min(self.max_new_tokens, room)),
            sampling=self.sampling,
            logprob_token_ids=self.logprob_token_ids,
        )


async def recall(
    question: Question,
    line: tuple[int, ...],
    view: tuple[int, ...],
    workspace: Workspace,
    thread: Thread,
    engine: Engine,
    report: StepReport,
) -> Recalled:
    """Select the view for a question and ask behind it.

    When the thread's last recall kept its view, the question is probed behind that view, as if
    it were the answer: if the selection keeps the view again, it is, and nothing is computed
    twice. Otherwise it is probed behind a small window, whose cost does not grow with the budget.

    Args:
        line: the thread's blocks, more than the budget.
        view: the view that the device may still hold.
    """
    step, limits, ms = question.step, question.limits, report.ms
    held = current_view(view, line)
    if held is None:
        held = window(line, limits.sink_blocks, limits.budget_blocks)
    held = held[: question.room_blocks]  # a page prefix: still on the device
    speculative = thread.kept_last_view
    probed = held if speculative else window(line, limits.sink_blocks, limits.probe_blocks)
    rid = f"{step.id}.probe"
    with ms.measure("commit"):
        prompt = await step.promise(probed, question.tokens)
    with ms.measure("probe"):
        await engine.watch_queries(rid, prompt.view.tokens)
        if speculative:
            probe = question.ask(prompt, attempt="probe")
        else:
            probe = step.run(prompt, rid=rid, max_new_tokens=0)

    async with AsyncExitStack() as on_leaving:
        on_leaving.push_async_callback(probe.aclose)
        with ms.measure("probe"):
            first = await anext(probe)
        regions = Regions.of_line(line, limits.sink_blocks, limits.recent_blocks)
        async with workspace.registration:
            candidates = _candidates(regions, workspace)
        with ms.measure("score"):
            scores = await engine.score(rid, workspace.name, bytes(candidates))
        if scores.rows != len(question.tokens):
            await probe.aclose()
            scores = await _probe_every_row(step, prompt, candidates, workspace, engine, report)
            speculative = False

        with ms.measure("plan"):
            plan = plan_view(
                current=held,
                regions=regions,
                candidates=[block for block, competes in enumerate(candidates) if competes],
                scores=scores.by_block,
                budget_blocks=limits.budget_blocks,
                room_blocks=question.room_blocks,
            )
        report.recalled, report.unchanged = True, plan.unchanged
        report.decisions = plan.decisions
        if plan.unchanged and speculative:
            on_leaving.pop_all()
            return Recalled(prompt, _resume(first, probe), held, plan.near_misses)

    with ms.measure("commit"):
        prompt = await step.promise(plan.view, question.tokens)
    return Recalled(prompt, question.ask(prompt), plan.view, plan.near_misses)


async def _probe_every_row(
    step: EngineStep,
    prompt: Prompt,
    candidates: bytearray,
    workspace: Workspace,
    engine: Engine,
    report: StepReport,
) -> Scores:
    """Probe again where the tree already had query pages, whose rows were therefore not computed.

    Raises:
        SelfCheckFailed: rows are missing even so.
    """
    rid = f"{step.id}.reprobe"
    wanted = len(prompt.token_ids) - prompt.view.tokens
    with report.ms.measure("probe"):
        await engine.watch_queries(rid, prompt.view.tokens)
        async for _ in step.run(prompt, rid=rid, max_new_tokens=0, compute_all=True):
            pass
    scores = await engine.score(rid, workspace.name, bytes(candidates))
    if scores.rows != wanted:
        raise SelfCheckFailed(
            f"the tap delivered {scores.rows} of {wanted} query rows",
            hint="the kvws plugin does not see this model's attention; restart the engine",
        )
    return scores


def _candidates(regions: Regions, workspace: Workspace) -> bytearray:
    """One byte per block of the workspace: 1 where it competes for the view."""
    mask = regions.competes(workspace.block_count)
    for block in range(workspace.block_count):
        if not workspace.exists(block):
            mask[block] = 0
    return mask


async def _resume(first: Chunk, rest: Answer) -> Answer:
    """A stream whose first chunk was already taken."""
    try:
        yield first
        async for chunk in rest:
            yield chunk
    finally:
        await rest.aclose()
