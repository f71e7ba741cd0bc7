"""Asking a real engine, for the tests: plainly, through a workspace, or over a chosen view."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvws.blocks.page import PageSource
from kvws.engine.client import SglangEngine
from kvws.engine.protocol import GenerateRequest
from kvws.limits import Limits
from kvws.observe.step_report import StepReport
from kvws.recall.view import ExecutionView, Prompt
from kvws.session.workspace import Workspace
from kvws.step import StepRequest, run_step

GREEDY = {"temperature": 0.0, "ignore_eos": True}
_serial = itertools.count()


@dataclass
class Answer:
    """Greedy tokens, and log-probabilities [tokens, ids] of the watched ids."""

    tokens: list[int]
    logprobs: torch.Tensor
    cached_tokens: int
    report: StepReport | None = None

    def off_by(self, other: Answer) -> float:
        """max |Δ log-probability|."""
        return float((self.logprobs - other.logprobs).abs().max())


def watched_ids(vocabulary: int) -> list[int]:
    """Every eighth id: enough of the distribution, and quick to report."""
    return list(range(0, vocabulary, 8))


async def ask_plainly(
    engine: SglangEngine, token_ids: Sequence[int], count: int, watched: Sequence[int]
) -> Answer:
    """The stock engine's answer: no workspace, a namespace that nobody else uses."""
    rid = f"plain-{next(_serial)}"
    return await _collect(
        engine,
        GenerateRequest(
            rid=rid,
            step=None,
            namespace=rid,
            token_ids=token_ids,
            max_new_tokens=count,
            sampling=GREEDY,
            logprob_token_ids=watched,
        ),
    )


async def ask_workspace(
    engine: SglangEngine,
    workspace: Workspace,
    token_ids: Sequence[int],
    limits: Limits,
    *,
    count: int = 1,
    watched: Sequence[int] = (0,),
    thread: str = "main",
    keep_generated: bool = False,
) -> Answer:
    """One agent step; integrity is checked after it."""
    request = StepRequest(
        thread=thread,
        token_ids=token_ids,
        max_new_tokens=count,
        keep_generated=keep_generated,
        sampling=GREEDY,
        logprob_token_ids=watched,
    )
    tokens: list[int] = []
    logprobs: torch.Tensor = torch.empty(0)
    cached = 0
    report = None
    async for output in run_step(request, workspace, engine, limits):
        if isinstance(output, StepReport):
            report = output
        else:
            tokens += output.token_ids
            logprobs = torch.tensor(output.logprobs)
            cached = output.cached_tokens
    workspace.check_integrity()
    await engine.check_integrity()
    return Answer(tokens, logprobs, cached, report)


async def ask_view(
    engine: SglangEngine,
    workspace: Workspace,
    sources: Sequence[PageSource],
    query: Sequence[int],
    count: int,
    watched: Sequence[int],
) -> Answer:
    """The answer behind a view that the test composes itself."""
    view = ExecutionView(tuple(sources))
    prompt = Prompt.compose(view, query, workspace.namespace, workspace.block_tokens)
    step = f"view-{next(_serial)}"
    await engine.open_step(step, workspace.name)
    assert await engine.promise(step, prompt.promised_pages()) == []
    answer = await _collect(
        engine,
        GenerateRequest(
            rid=f"{step}.answer",
            step=step,
            namespace=prompt.namespace,
            token_ids=prompt.token_ids,
            max_new_tokens=count,
            sampling=GREEDY,
            logprob_token_ids=watched,
        ),
    )
    await engine.close_step(step, [])
    assert answer.cached_tokens >= view.tokens
    return answer


async def _collect(engine: SglangEngine, request: GenerateRequest) -> Answer:
    chunks = [chunk async for chunk in engine.generate(request)]
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    return Answer(tokens, torch.tensor(chunks[-1].logprobs), chunks[0].cached_tokens)
