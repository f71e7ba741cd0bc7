"""Recall: probe the query, score all blocks, choose and plan the next view, and ask behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from kvws.blocks.key import BLOCK_TOKENS
from kvws.choosing import choose
from kvws.engine.protocol import Chunk, Engine
from kvws.errors import SelfCheckFailed
from kvws.limits import Limits
from kvws.looking import Look, competing
from kvws.observe.step_report import StepReport
from kvws.prefill import EngineStep
from kvws.recall.plan import plan_view
from kvws.recall.regions import Regions, blocks_of
from kvws.recall.selector import Asked
from kvws.recall.spans import PromptSpans, Span
from kvws.recall.view import Prompt
from kvws.session.ingest import current_view, window
from kvws.session.workspace import Thread, Workspace

Answer = AsyncGenerator[Chunk, None]

_TASK_BLOCKS = 2
"""A probe asks with so much of the task again: enough to weigh as much as a short tool result."""


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
    spans: PromptSpans,
    workspace: Workspace,
    thread: Thread,
    engine: Engine,
    report: StepReport,
) -> Recalled:
    """Select the view for a question and ask behind it.

    When the thread's last recall kept its view, the question is probed behind that view, as if
    it were the answer: if the selection keeps the view again, it is, and nothing is computed
    twice. Otherwise it is probed behind a small window, whose cost does not grow with the budget,
    and the end of the task is asked again in front of it: the new tokens of a step may be no more
    than a tool's "ok". A question of less than a block is always probed so, or views would come
    and go with such small talk. The repeated text is not part of the answer's prompt, so no block
    is ever made of a page that was computed behind it.

    Args:
        line: the thread's blocks, more than the budget.
        view: the view that the device may still hold.
        spans: of the whole prompt, whose first tokens are those of `line`.
    """
    step, limits, ms = question.step, question.limits, report.ms
    held = current_view(view, line)
    if held is None:
        held = window(line, limits.sink_blocks, limits.budget_blocks)
    held = held[: question.room_blocks]  # a page prefix: still on the device
    small = window(line, limits.sink_blocks, limits.probe_blocks)
    free_blocks = limits.room_blocks(len(question.tokens)) - len(small)
    task = _task_again(spans.task, line, workspace, free_blocks)
    speaks_for_itself = not task or len(question.tokens) >= BLOCK_TOKENS
    speculative = thread.kept_last_view and speaks_for_itself
    probed, again = (held, list[int]()) if speculative else (small, task)
    asked = [*again, *question.tokens]
    rid = f"{step.id}.probe"
    with ms.measure("commit"):
        prompt = await step.promise(probed, asked)
    with ms.measure("probe"):
        await engine.watch_queries(rid, prompt.view.tokens)
        if speculative:
            probe = question.ask(prompt, attempt="probe")
        else:
            probe = step.run(prompt, rid=rid, max_new_tokens=0)

    async with AsyncExitStack() as on_leaving:
        on_leaving.push_async_callback(probe.aclose)
        with ms.measure("plan"):
            regions = Regions.of_prompt(
                line,
                spans,
                sink_blocks=limits.sink_blocks,
                recent_blocks=limits.recent_blocks,
                budget_blocks=limits.budget_blocks,
            )
            asking = Asked(
                line=line,
                question=question.tokens,
                own=workspace.selector.content_rows(question.tokens, again),
                regions=regions,
                candidates=competing(regions, line, question.tokens, workspace, thread.name),
                in_view=frozenset(held),
                budget_blocks=limits.budget_blocks,
                again=again,
            )
        query_first = BLOCK_TOKENS * len(line) - len(again)
        look = Look(engine, workspace, asking, query_first, limits.scored_blocks)
        at_first_look = asyncio.ensure_future(look.first())  # while the engine probes
        on_leaving.callback(at_first_look.cancel)
        with ms.measure("probe"):
            first = await anext(probe)
        with ms.measure("plan"):
            known = await at_first_look
        with ms.measure("score"):
            looked = await look.with_queries(rid, known)
        if looked.rows != len(asked):
            await probe.aclose()
            await _probe_every_row(step, prompt, engine, report)
            with ms.measure("score"):
                looked = await look.with_queries(_reprobe(step), known)
            if looked.rows != len(asked):
                raise SelfCheckFailed(
                    f"the tap delivered {looked.rows} of {len(asked)} query rows",
                    hint="the kvws plugin does not see this model's attention; restart the engine",
                )
            speculative = False

        with ms.measure("plan"):
            choice = await choose(workspace, looked.asked, looked.by_signal)
            plan = plan_view(
                current=held,
                regions=regions,
                chosen=choice.chosen,
                budget_blocks=limits.budget_blocks,
                room_blocks=question.room_blocks,
            )
        report.recalled, report.unchanged = True, plan.unchanged
        report.scored_blocks = int(looked.asked.candidates.sum())
        report.decisions = plan.decisions
        report.signals = tuple(signal.value for signal in choice.signals)
        report.shrunk = {part.value: blocks for part, blocks in regions.shrunk.items()}
        if plan.unchanged and speculative:
            on_leaving.pop_all()
            return Recalled(prompt, _resume(first, probe), held, plan.near_misses)

    with ms.measure("commit"):
        prompt = await step.promise(plan.view, question.tokens)
    return Recalled(prompt, question.ask(prompt), plan.view, plan.near_misses)


async def _probe_every_row(
    step: EngineStep, prompt: Prompt, engine: Engine, report: StepReport
) -> None:
    """Probe again where the tree already had query pages, whose rows were therefore not
    computed."""
    rid = _reprobe(step)
    with report.ms.measure("probe"):
        await engine.watch_queries(rid, prompt.view.tokens)
        async for _ in step.run(prompt, rid=rid, max_new_tokens=0, compute_all=True):
            pass


def _reprobe(step: EngineStep) -> str:
    return f"{step.id}.reprobe"


def _task_again(
    task: Span | None, line: tuple[int, ...], workspace: Workspace, free_blocks: int
) -> list[int]:
    """The task's last blocks as text; nothing while the task ends in the question itself."""
    if task is None or task.end > BLOCK_TOKENS * len(line):
        return []
    places = blocks_of(task, len(line))
    again = min(len(places), _TASK_BLOCKS, max(0, free_blocks))
    return workspace.tokens_of([line[place] for place in places[len(places) - again :]])


async def _resume(first: Chunk, rest: Answer) -> Answer:
    """A stream whose first chunk was already taken."""
    try:
        yield first
        async for chunk in rest:
            yield chunk
    finally:
        await rest.aclose()
