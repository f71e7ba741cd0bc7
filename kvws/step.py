"""One agent step, from the client's prompt to registered blocks. Read this first.

The order below is the order of the data path: align, ingest, (probe, score, plan), commit,
decode, register.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from kvws.blocks.key import BLOCK_TOKENS
from kvws.engine.protocol import Chunk, Engine
from kvws.errors import LoadFailed, PoisonedView, PromptError
from kvws.limits import Limits
from kvws.observe.step_report import StepReport
from kvws.prefill import EngineStep, StepEnd, ingest
from kvws.recall.regions import place_of
from kvws.recall.spans import PromptSpans
from kvws.recalling import Question, recall
from kvws.session.ingest import ahead_of_query
from kvws.session.workspace import Thread, Workspace

_ATTEMPTS = 3


@dataclass(frozen=True)
class StepRequest:
    """One model call by the harness.

    Attributes:
        thread: the thread it continues.
        token_ids: the prompt as the chat template renders it, behind `behind`; not empty.
        max_new_tokens: at least 1; clamped to what the context leaves.
        keep_generated: register generated tokens as blocks. Off when a recorded answer, not the
            generated one, is what the next prompt continues with.
        sampling: further sampling parameters, as the engine spells them.
        logprob_token_ids: report the log-probability of these ids at each generated token.
        behind: blocks that the prompt is known to start with, whose tokens need not be compared.
        spans: parts of the prompt that the view must keep, in tokens of the whole prompt.
        note: kept with the step's report in the workspace's journal; plain data.
    """

    thread: str
    token_ids: Sequence[int]
    max_new_tokens: int
    keep_generated: bool = True
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    logprob_token_ids: Sequence[int] | None = None
    behind: tuple[int, ...] = ()
    spans: PromptSpans = field(default_factory=PromptSpans)
    note: Any = None

    @property
    def prompt_tokens(self) -> int:
        """Length of the whole prompt."""
        return BLOCK_TOKENS * len(self.behind) + len(self.token_ids)


StepOutput = Chunk | StepReport
"""A step streams chunks and ends with its report."""


async def run_step(
    request: StepRequest, workspace: Workspace, engine: Engine, limits: Limits
) -> AsyncGenerator[StepOutput, None]:
    """Answer a prompt of any length from a bounded execution view.

    A lost block or a poisoned view starts the step anew, before anything was yielded.

    Raises:
        PromptError: the prompt is empty.
        LoadFailed, PoisonedView: three attempts in a row failed, or one that had yielded.
        HostTierFull: new blocks could not be kept.
        EngineDied: the engine's process is gone.
    """
    if not request.token_ids:
        raise PromptError("the prompt has no tokens", hint="send at least one message")
    thread = workspace.thread(request.thread)
    async with thread.lock:
        report = StepReport(request.thread, prompt_tokens=request.prompt_tokens)
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
            except (LoadFailed, PoisonedView):
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
        aligned = workspace.align(request.token_ids, request.behind)
    line, view, query = aligned.line, thread.view, aligned.pending
    unfinished = sum(place_of(block, line) is not None for block in thread.unfinished)
    unfinished_tokens = BLOCK_TOKENS * unfinished
    report.new_tokens = unfinished_tokens + len(query)
    if report.retries == 0:  # a later attempt finds what this very report has counted already
        report.resumed_tokens = unfinished_tokens
        report.computed_tokens = unfinished_tokens
    beside = len(query) + limits.answer_tokens(request.max_new_tokens)
    fits_as_it_is = len(line) <= limits.budget_blocks and limits.fits(len(line), beside)
    if not fits_as_it_is:
        ahead = ahead_of_query(len(query), limits.query_tokens)
        with report.ms.measure("ingest"):
            line, view = await ingest(
                query[:ahead], line, view, workspace, thread, engine, limits, report
            )
        query = query[ahead:]
    report.query_tokens = len(query)

    async with EngineStep(workspace, engine, limits, report) as step:
        question = Question(
            step=step,
            tokens=query,
            limits=limits,
            max_new_tokens=request.max_new_tokens,
            sampling=request.sampling,
            logprob_token_ids=request.logprob_token_ids,
        )
        if len(line) <= limits.budget_blocks:
            with report.ms.measure("commit"):
                prompt = await step.promise(line, query)
            stream, view = question.ask(prompt), line
            near_misses = ()
        else:
            recalled = await recall(
                question, line, view, request.spans, workspace, thread, engine, report
            )
            prompt, stream, view = recalled.prompt, recalled.answer, recalled.view
            near_misses = recalled.near_misses

        generated: list[int] = []
        asked = time.perf_counter()
        first = True
        try:
            async with aclosing(stream):
                async for chunk in stream:
                    if first:
                        first = False
                        report.ms.prefill = 1e3 * (time.perf_counter() - asked)
                        report.ms.first_token = 1e3 * (time.perf_counter() - begin)
                        if near_misses and workspace.is_durable:  # read while the model decodes
                            await engine.look_ahead(workspace.name, near_misses)
                    generated += chunk.token_ids
                    if chunk.finish_reason is not None:
                        # Before the last yield: a caller that wanted one item never resumes us.
                        report.ms.decode = 1e3 * (time.perf_counter() - asked) - report.ms.prefill
                        report.generated_tokens = len(generated)
                        report.view_blocks = len(view)
                        kept = generated[:-1] if request.keep_generated else ()
                        end = StepEnd(kept, request.note)
                        await step.register(prompt, thread, line, view, end)
                    yield chunk
        except (GeneratorExit, asyncio.CancelledError):
            if not first and step.is_open:
                # The prompt's pages were handed over before the first token came: whoever asks
                # again finds them.
                await step.register(prompt, thread, line, view)
            raise
    yield report
