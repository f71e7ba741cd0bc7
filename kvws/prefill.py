"""Engine passes over an execution view: promise it, compute behind it, register what was computed.

Every pass runs inside an open step: `EngineStep` opens it, and closes it whatever happens, so
that no promise and no staged page outlives its step.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from kvws.blocks.key import BLOCK_TOKENS
from kvws.engine.protocol import Chunk, Engine, GenerateRequest
from kvws.errors import EngineError, HostTierFull, LoadFailed, PoisonedView
from kvws.limits import Limits
from kvws.observe.step_report import StepReport
from kvws.recall.view import ExecutionView, Prompt
from kvws.session.ingest import current_view, grown_view, window
from kvws.session.workspace import Workspace

_BARREN_PASSES = 3
"""Passes in a row, each but the first in a fresh namespace, that may register nothing."""


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
        """
        view = ExecutionView.of_blocks(blocks)
        workspace = self._workspace
        while True:
            prompt = Prompt.compose(
                view, new_tokens, workspace.namespace, workspace.block_tokens
            )
            missing = await self._engine.promise(self.id, prompt.promised_pages())
            if not missing:
                return prompt
            for block in missing:
                await repair(block, workspace, self._engine, self._limits, self._report)

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
        self, prompt: Prompt, line: tuple[int, ...], generated: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """Close the step: the full pages behind the view become blocks that continue `line`.

        Args:
            generated: decoded tokens whose KV exists.

        Returns:
            The new blocks that every rank holds: a run without gaps. It ends early when the host
            tier is full, or when the tree took a new page for a view page of the same tokens and
            so did not compute it; the next pass, in a fresh namespace, will.
        """
        workspace = self._workspace
        pages = prompt.new_pages(generated)
        tail = [*prompt.token_ids[prompt.view.tokens :], *generated]
        async with workspace.registration:
            first_fresh = workspace.block_count
            numbers = workspace.allocate(line, tail)
            named = [(name, n, at) for (name, at), n in zip(pages, numbers, strict=True)]
            resident = await self._close(named)
            held = next((i for i, n in enumerate(numbers) if n not in resident), len(numbers))
            given_back = [n for n in numbers[held:] if n >= first_fresh]
            workspace.take_back(given_back)
            if given_back:  # some ranks may hold what another does not
                await self._engine.forget(workspace.name, given_back)
        if held < len(numbers) and not self.host_full:
            workspace.start_new_epoch()
        return tuple(numbers[:held])

    async def recompute(self, prompt: Prompt, block: int) -> bool:
        """Close the step: the first page behind the view becomes `block` again."""
        page_hash, index = prompt.new_pages()[0]
        return block in await self._close([(page_hash, block, index)])

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
        (line, view), both with the new blocks at the end.

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
            new = await step.register(prompt, line)
        if not new and step.host_full:
            raise HostTierFull(
                f"{len(chunk)} new tokens could not be kept as blocks", hint="raise --host-bytes"
            )
        barren_passes = 0 if new else barren_passes + 1
        if barren_passes == _BARREN_PASSES:
            raise EngineError(
                f"{len(chunk)} tokens were computed {barren_passes} times and never staged out",
                hint="the engine's log says why stage-out fails",
            )
        line, view = line + new, grown_view(view, new)
        done += len(new) * BLOCK_TOKENS
    return line, view


async def repair(
    block: int, workspace: Workspace, engine: Engine, limits: Limits, report: StepReport
) -> None:
    """Compute a lost block's KV again from its tokens, over the window that preceded it.

    Raises:
        LoadFailed: the engine did not hand the block's page over, twice.
        HostTierFull: there is no room to keep it.
    """
    tokens = workspace.block_tokens(block)
    view = window(tuple(workspace.lineage(block)), limits.sink_blocks, limits.budget_blocks)
    for _ in range(2):
        async with EngineStep(workspace, engine, limits, report) as step:
            prompt = await step.promise(view, tokens)
            async for _ in step.run(prompt, rid=f"{step.id}.repair", max_new_tokens=0):
                pass
            if await step.recompute(prompt, block):
                report.repaired_blocks += 1
                return
        if step.host_full:
            raise HostTierFull(
                f"block {block} of workspace {workspace.name} is lost, and there is no room to "
                "keep it once it is computed again",
                hint="raise --host-bytes",
            )
        # The tree holds the page as "stored" and does not offer it again; a fresh namespace does.
        workspace.start_new_epoch()
    raise LoadFailed(
        f"block {block} of workspace {workspace.name} is lost and could not be computed again",
        hint="the engine's log says why stage-out fails",
    )
