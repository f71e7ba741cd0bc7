"""Engine passes over an execution view: promise it, compute behind it, register what was computed.

Every pass runs inside an open step: `EngineStep` opens it, and closes it whatever happens, so
that no promise and no staged page outlives its step.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from kvws.blocks.key import BLOCK_TOKENS
from kvws.engine.protocol import Chunk, Engine, GenerateRequest
from kvws.errors import EngineError, HostTierFull, LoadFailed, PoisonedView
from kvws.limits import Limits
from kvws.observe.step_report import StepReport
from kvws.recall.view import ExecutionView, Prompt
from kvws.session.ingest import current_view, grown_view, runs_of, window
from kvws.session.workspace import Thread, Workspace

_BARREN_PASSES = 3
"""Passes in a row, each but the first in a fresh namespace, that may register nothing."""

_REPAIR_ROUNDS = 4
"""Times that a view's lost blocks are computed again before it is given up."""

_REPAIR_ATTEMPTS = 2
"""Passes that may fail to hand over the pages of lost blocks, the second in a fresh namespace."""


@dataclass(frozen=True)
class StepEnd:
    """How an agent's step ends.

    Attributes:
        generated: decoded tokens whose KV exists.
        note: what the caller wants kept with the step's report; plain data.
    """

    generated: Sequence[int]
    note: Any


class EngineStep:
    """One open step on the data plane, as an async context manager."""

    def __init__(
        self, workspace: Workspace, engine: Engine, limits: Limits, report: StepReport
    ) -> None:
        self.id = uuid.uuid4().hex
        self.host_full = False
        self._workspace = workspace
        self._engine = engine
        self._limits = limits
        self._report = report
        self._open = False

    @property
    def is_open(self) -> bool:
        return self._open

    async def __aenter__(self) -> Self:
        try:
            await self._engine.open_step(self.id, self._workspace.name)
        except asyncio.CancelledError:
            await self._close([])  # the message is on its way: the step will be open
            raise
        self._open = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._open:
            await self._close([])

    async def promise(self, blocks: Sequence[int], new_tokens: Sequence[int]) -> Prompt:
        """Commit a view of whole blocks; lost blocks are computed again first.

        Raises:
            LoadFailed: a lost block could not be computed again.
            HostTierFull: blocks are lost as fast as they are computed again.
        """
        for _ in range(_REPAIR_ROUNDS):
            prompt, missing = await self.promise_held(blocks, new_tokens)
            if not missing:
                return prompt
            await repair(missing, self._workspace, self._engine, self._limits, self._report)
        raise HostTierFull(
            f"the host tier does not hold a view of {len(blocks)} blocks", hint="raise --host-gb"
        )

    async def promise_held(
        self, blocks: Sequence[int], new_tokens: Sequence[int]
    ) -> tuple[Prompt, list[int]]:
        """Commit a view if no block of it is lost.

        Returns:
            (the prompt, the lost blocks); if there are any, nothing was promised.
        """
        workspace = self._workspace
        prompt = Prompt.compose(
            ExecutionView.of_blocks(blocks),
            new_tokens,
            workspace.namespace,
            workspace.block_tokens,
        )
        return prompt, await self._engine.promise(self.id, prompt.promised_pages())

    async def run(
        self,
        prompt: Prompt,
        *,
        rid: str,
        max_new_tokens: int,
        compute_all: bool = False,
        sampling: Mapping[str, Any] | None = None,
        logprob_token_ids: Sequence[int] | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """Compute behind a promised view and stream the answer.

        Args:
            compute_all: compute every new row even if the tree already has its page.

        Raises:
            PoisonedView: fewer view tokens were taken from the cache than promised: the engine
                computed view pages as text, and their hashes name other KV from now on. The
                namespace is condemned, for every thread that still asks in it.
        """
        request = GenerateRequest(
            rid=rid,
            step=self.id,
            namespace=prompt.namespace,
            token_ids=prompt.token_ids,
            max_new_tokens=max_new_tokens,
            compute_from=prompt.view.tokens if compute_all else None,
            sampling=sampling or {},
            logprob_token_ids=logprob_token_ids,
        )
        self._report.passes += 1
        first = True
        stream = self._engine.generate(request)
        try:
            async for chunk in stream:
                if first:
                    first = False
                    self._require_exact_view(prompt, chunk.cached_tokens)
                    self._report.computed_tokens += len(prompt.token_ids) - chunk.cached_tokens
                yield chunk
        finally:
            await stream.aclose()

    def _require_exact_view(self, prompt: Prompt, cached_tokens: int) -> None:
        recomputed = cached_tokens < prompt.view.tokens
        if recomputed:
            self._workspace.condemn(prompt.namespace)
        if recomputed or self._workspace.is_condemned(prompt.namespace):
            raise PoisonedView(
                f"{cached_tokens} of {prompt.view.tokens} view tokens came from the cache, in a "
                "namespace where view pages were computed as text"
            )

    async def register(
        self,
        prompt: Prompt,
        thread: Thread,
        line: tuple[int, ...],
        view: tuple[int, ...],
        end: StepEnd | None = None,
    ) -> tuple[int, ...]:
        """Close the step: the full pages behind the view become blocks that continue `line`, the
        thread moves on behind them, and the journal has all that as one commit.

        Args:
            view: the blocks that the pass was computed behind.
            end: the agent's step ends here, and the commit has its report as well.

        Returns:
            The new blocks that every rank holds: a run without gaps. It ends early when the host
            tier is full, or when the tree took a new page for a view page of the same tokens and
            so did not compute it; the next pass, in a fresh namespace, will.
        """
        begin = time.perf_counter()
        workspace = self._workspace
        generated = end.generated if end is not None else ()
        tail = [*prompt.token_ids[prompt.view.tokens :], *generated]
        async with workspace.registration:
            known = len(workspace.continuation(line, tail))
            numbers = workspace.allocate(line, tail)
            workspace.announce(numbers[known:])
            # A rank may store a block the moment it is named: by then the log must tell of it, or
            # after a kill its number would stand for nothing, and be lost.
            await workspace.journal.written()
            pages = prompt.new_pages(generated)
            named = [(name, n, at) for (name, at), n in zip(pages, numbers, strict=True)]
            try:
                resident = await self._close(named)
                held = next((i for i, n in enumerate(numbers) if n not in resident), len(numbers))
                given_back = numbers[max(held, known) :]
                workspace.take_back(given_back)
                if given_back:  # some ranks may hold what another does not
                    await self._engine.forget(workspace.name, given_back)
            except BaseException:
                workspace.leave_unsettled(numbers[known:])
                raise
            new, fresh = tuple(numbers[:held]), numbers[known:held]
            self._count_again(fresh)
            ended = None
            if end is not None:
                self._report.ms.register = 1e3 * (time.perf_counter() - begin)
                ended = (self._report, end.note)
            workspace.record(thread, line + new, grown_view(view, new), fresh, ended=ended)
        if held < len(numbers) and not self.host_full:
            workspace.start_new_epoch()
        await workspace.journal.written()
        return new

    def _count_again(self, blocks: Sequence[int]) -> None:
        again = self._workspace.acknowledged_before.intersection(blocks)
        self._report.recomputed_acknowledged_blocks += len(again)

    async def recompute(self, prompt: Prompt, blocks: Sequence[int]) -> bool:
        """Close the step: the pages behind the view become these blocks again.

        Returns whether every rank has all of them.
        """
        pages = zip(prompt.new_pages(), blocks, strict=True)
        resident = await self._close([(name, block, at) for (name, at), block in pages])
        again = resident.intersection(blocks)
        self._report.repaired_blocks += len(again)
        self._count_again(list(again))
        return len(again) == len(blocks)

    async def _close(self, named: Sequence[tuple[str, int, int]]) -> frozenset[int]:
        self._open = False
        closed = await self._engine.close_step(self.id, named)
        self.host_full = closed.host_full
        self._report.loaded_pages += closed.loaded_pages
        self._report.ms.stage_in += closed.stage_in_ms
        return closed.resident


async def ingest(
    tokens: Sequence[int],
    line: tuple[int, ...],
    view: tuple[int, ...],
    workspace: Workspace,
    thread: Thread,
    engine: Engine,
    limits: Limits,
    report: StepReport,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Prefill whole blocks of tokens in chunks, each over the view of that moment.

    Args:
        tokens: a multiple of 32.
        line: blocks before them.
        view: the current view; used while the chunk fits beside it, else sink + newest tail.

    Returns:
        (line, view), both with the new blocks at the end; the thread's own are moved on with them
        after every chunk, so that a step that is cut off goes on from where it was.

    Raises:
        HostTierFull: the new blocks could not be kept.
        EngineError: the engine computes pages and hands none over.
    """
    done = barren_passes = 0
    while done < len(tokens):
        chunk = tokens[done : done + limits.chunk_tokens]
        held = current_view(view, line)
        if held is None or not limits.fits(len(held), len(chunk)):
            held = window(line, limits.sink_blocks, limits.budget_blocks)
        view = held
        async with EngineStep(workspace, engine, limits, report) as step:
            prompt = await step.promise(view, chunk)
            async for _ in step.run(prompt, rid=f"{step.id}.ingest", max_new_tokens=0):
                pass
            new = await step.register(prompt, thread, line, view)
        if not new and step.host_full:
            raise HostTierFull(
                f"{len(chunk)} new tokens could not be kept as blocks", hint="raise --host-gb"
            )
        barren_passes = 0 if new else barren_passes + 1
        if barren_passes == _BARREN_PASSES:
            raise EngineError(
                f"{len(chunk)} tokens were computed {barren_passes} times and never staged out",
                hint="the engine's log says why stage-out fails",
            )
        line, view = thread.line, thread.view
        done += len(new) * BLOCK_TOKENS
    return line, view


async def repair(
    lost: Sequence[int], workspace: Workspace, engine: Engine, limits: Limits, report: StepReport
) -> None:
    """Compute lost blocks' KV again from their tokens.

    Blocks that followed each other are computed together, over those of the blocks before them
    that are still there: repairing what is in the way as well would have no end on a tier that
    is too small for it.

    Raises:
        LoadFailed: the engine did not hand a block's page over, twice.
        HostTierFull: there is no room to keep them.
    """
    for run in runs_of(lost, workspace, limits.chunk_tokens // BLOCK_TOKENS):
        for _ in range(_REPAIR_ATTEMPTS):
            async with EngineStep(workspace, engine, limits, report) as step:
                prompt = await _promise_before(run, step, workspace, limits)
                async for _ in step.run(prompt, rid=f"{step.id}.repair", max_new_tokens=0):
                    pass
                if await step.recompute(prompt, run):
                    break
            if step.host_full:
                raise HostTierFull(
                    f"blocks {run} of workspace {workspace.name} are lost, and there is no room "
                    "to keep them once they are computed again",
                    hint="raise --host-gb",
                )
            # The tree holds a page as "stored" and does not offer it again; a fresh namespace
            # does.
            workspace.start_new_epoch()
        else:
            raise LoadFailed(
                f"blocks {run} of workspace {workspace.name} are lost and could not be computed "
                "again",
                hint="the engine's log says why stage-out fails",
            )


async def _promise_before(
    run: Sequence[int], step: EngineStep, workspace: Workspace, limits: Limits
) -> Prompt:
    """Promise the window that preceded blocks, as far as it is there."""
    tokens = workspace.tokens_of(run)
    line = tuple(workspace.lineage(run[0]))
    budget_blocks = min(limits.budget_blocks, limits.room_blocks(len(tokens)))
    view = window(line, limits.sink_blocks, budget_blocks)
    while True:
        prompt, missing = await step.promise_held(view, tokens)
        if not missing:
            return prompt
        view = tuple(block for block in view if block not in missing)
