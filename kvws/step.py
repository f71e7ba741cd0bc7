"""One agent step, from the client's prompt to registered blocks. Read this first.

The order below is the order of the data path: align, ingest, (probe, score, plan), commit,
decode, register.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any

from kvws.engine.protocol import Chunk, Engine
from kvws.errors import LoadFailed, PoisonedView, SelfCheckFailed
from kvws.limits import Limits
from kvws.observe.step_report import StepReport
from kvws.prefill import EngineStep, ingest
from kvws.recall.plan import Plan, Regions, plan_view
from kvws.recall.view import Prompt
from kvws.session.ingest import ahead_of_query, current_view, grown_view, window
from kvws.session.workspace import Thread, Workspace

_ATTEMPTS = 3


@dataclass(frozen=True)
class StepRequest:
    """One model call by the harness.

    Attributes:
        thread: the thread it continues.
        token_ids: the whole prompt as the chat template renders it.
        max_new_tokens: at least 1; clamped to what the context leaves.
        keep_generated: register generated tokens as blocks. Off when a recorded answer, not the
            generated one, is what the next prompt continues with.
        sampling: further sampling parameters, as the engine spells them.
        logprob_token_ids: report the log-probability of these ids at each generated token.
    """

    thread: str
    token_ids: Sequence[int]
    max_new_tokens: int
    keep_generated: bool = True
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    logprob_token_ids: Sequence[int] | None = None


StepOutput = Chunk | StepReport
"""A step streams chunks and ends with its report."""


async def run_step(
    request: StepRequest, workspace: Workspace, engine: Engine, limits: Limits
) -> AsyncGenerator[StepOutput, None]:
    """Answer a prompt of any length from a bounded execution view.

    A lost block or a poisoned view starts the step anew, before anything was yielded.

    Raises:
        LoadFailed, PoisonedView: three attempts in a row failed, or one that had yielded.
        HostTierFull: new blocks could not be kept.
        EngineDied: the engine's process is gone.
    """
    thread = workspace.thread(request.thread)
    async with thread.lock:
        report = StepReport(request.thread, prompt_tokens=len(request.token_ids))
        for attempt in range(_ATTEMPTS):
            report.retries = attempt
            yielded = False
            # Closed here and now, or a caller that leaves early would leave the step open.
            attempted = aclosing(_attempt(request, workspace, thread, engine, limits, report))
            try:
                async with attempted as outputs:
                    async for output in outputs:
                        yielded = True
                        yield output
                return
            except (LoadFailed, PoisonedView) as error:
                if isinstance(error, PoisonedView):
                    workspace.start_new_epoch()
                if yielded or attempt == _ATTEMPTS - 1:
                    raise


async def finish_step(outputs: AsyncGenerator[StepOutput, None]) -> StepReport:
    """Run a step to its end for its report alone."""
    report: StepReport | None = None
    async for output in outputs:
        if isinstance(output, StepReport):
            report = output
    assert report is not None, "a step ends with its report"
    return report


async def _attempt(
    request: StepRequest,
    workspace: Workspace,
    thread: Thread,
    engine: Engine,
    limits: Limits,
    report: StepReport,
) -> AsyncGenerator[StepOutput, None]:
    begin = time.perf_counter()
    async with workspace.registration:
        aligned = workspace.align(request.token_ids)
    line, view, query = aligned.line, thread.view, aligned.pending
    report.new_tokens = len(query)
    beside = len(query) + limits.answer_tokens(request.max_new_tokens)
    fits_as_it_is = len(line) <= limits.budget_blocks and limits.fits(len(line), beside)
    if not fits_as_it_is:
        ahead = ahead_of_query(len(query), limits.query_tokens)
        with report.ms.measure("ingest"):
            line, view = await ingest(
                query[:ahead], line, view, workspace, engine, limits, report
            )
        query = query[ahead:]
    report.query_tokens = len(query)

    async with EngineStep(workspace, engine, limits, report) as step:
        answer = _Answer(request, step, query, limits)
        if len(line) <= limits.budget_blocks:
            with report.ms.measure("commit"):
                prompt = await step.promise(line, query)
            stream, view = answer.ask(prompt), line
        else:
            recalled = await _recall(answer, line, view, workspace, thread, engine, report)
            prompt, stream, view = recalled

        generated: list[int] = []
        asked = time.perf_counter()
        first = True
        try:
            async for chunk in stream:
                if first:
                    first = False
                    report.ms.prefill = 1e3 * (time.perf_counter() - asked)
                    report.ms.first_token = 1e3 * (time.perf_counter() - begin)
                generated += chunk.token_ids
                if chunk.finish_reason is not None:
                    # Before the last yield: a caller that wanted one item never resumes us.
                    report.ms.decode = 1e3 * (time.perf_counter() - asked) - report.ms.prefill
                    report.generated_tokens = len(generated)
                    report.view_blocks = len(view)
                    kept = generated[:-1] if request.keep_generated else ()
                    with report.ms.measure("register"):
                        new = await step.register(prompt, line, kept)
                    thread.line, thread.view = line + new, grown_view(view, new)
                yield chunk
        finally:
            await stream.aclose()
    yield report


class _Answer:
    """The request that answers the step's query behind a view; a probe is the same request."""

    def __init__(
        self, request: StepRequest, step: EngineStep, query: Sequence[int], limits: Limits
    ) -> None:
        self.step = step
        self.query = query
        self.limits = limits
        self._request = request

    @property
    def room_blocks(self) -> int:
        """Blocks of the largest view that the query and its answer fit behind."""
        answer = self.limits.answer_tokens(self._request.max_new_tokens)
        return self.limits.room_blocks(len(self.query) + answer)

    def ask(self, prompt: Prompt, *, attempt: str = "answer") -> AsyncGenerator[Chunk, None]:
        """Generate, as far as the context allows."""
        room = self.limits.generation_tokens(len(prompt.token_ids))
        return self.step.run(
            prompt,
            rid=f"{self.step.id}.{attempt}",
            max_new_tokens=max(1, min(self._request.max_new_tokens, room)),
            sampling=self._request.sampling,
            logprob_token_ids=self._request.logprob_token_ids,
        )


async def _recall(
    answer: _Answer,
    line: tuple[int, ...],
    view: tuple[int, ...],
    workspace: Workspace,
    thread: Thread,
    engine: Engine,
    report: StepReport,
) -> tuple[Prompt, AsyncGenerator[Chunk, None], tuple[int, ...]]:
    """Probe the query on the current view, select, and ask on the selected view.

    When the last recall kept the view, the probe is asked as if it were the answer: if the
    selection leaves the view alone again, it is the answer, and nothing is computed twice.
    """
    step, query, limits, ms = answer.step, answer.query, answer.limits, report.ms
    held = current_view(view, line)
    if held is None:
        held = window(line, limits.sink_blocks, limits.budget_blocks)
    room_blocks = answer.room_blocks
    view = held[:room_blocks]  # a page prefix: still on the device

    speculative = thread.kept_last_view
    rid = f"{step.id}.probe"
    with ms.measure("commit"):
        prompt = await step.promise(view, query)
    with ms.measure("probe"):
        await engine.watch_queries(rid, prompt.view.tokens)
        if speculative:
            probe = answer.ask(prompt, attempt="probe")
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
        if scores.rows != len(query):
            await probe.aclose()
            scores = await _probe_every_row(step, prompt, candidates, workspace, engine, report)
            speculative = False

        with ms.measure("plan"):
            plan = plan_view(
                current=view,
                regions=regions,
                candidates=[block for block, competes in enumerate(candidates) if competes],
                scores=scores.by_block,
                budget_blocks=limits.budget_blocks,
                room_blocks=room_blocks,
            )
        _note(plan, thread, report)
        if plan.unchanged and speculative:
            on_leaving.pop_all()
            return prompt, _resume(first, probe), view

    with ms.measure("commit"):
        prompt = await step.promise(plan.view, query)
    return prompt, answer.ask(prompt), plan.view


async def _probe_every_row(
    step: EngineStep,
    prompt: Prompt,
    candidates: bytearray,
    workspace: Workspace,
    engine: Engine,
    report: StepReport,
) -> Any:
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
    mask = regions.competes(workspace.block_count)
    for block in range(workspace.block_count):
        if not workspace.exists(block):
            mask[block] = 0
    return mask


def _note(plan: Plan, thread: Thread, report: StepReport) -> None:
    thread.kept_last_view = plan.unchanged
    report.recalled = True
    report.unchanged = plan.unchanged
    report.decisions = plan.decisions


async def _resume(
    first: Chunk, rest: AsyncGenerator[Chunk, None]
) -> AsyncGenerator[Chunk, None]:
    """A stream whose first chunk was already taken."""
    try:
        yield first
        async for chunk in rest:
            yield chunk
    finally:
        await rest.aclose()
