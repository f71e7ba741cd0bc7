# pyright: basic
"""SGLang's TokenizerManager and the ranks' control sockets, as one `Engine`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import HTTPException
from sglang.srt.managers.io_struct import GenerateReqInput

from kvws.blocks.page import PageSource
from kvws.engine.control_client import Ranks
from kvws.engine.liveness import Liveness
from kvws.engine.protocol import Chunk, ClosedStep, GenerateRequest, Scores
from kvws.engine.scores import runs_of_ranks, scores_of_ranks
from kvws.errors import ControlError, EngineError, LoadFailed

FAILED_LOAD_MESSAGE = "External KV cache load failed"
"""What SGLang aborts a request with when its linker could not fill a page."""


_BACKLOG_POLL_S = 0.01


class SglangEngine:
    """Implements `kvws.engine.protocol.Engine`."""

    def __init__(
        self,
        tokenizer_manager: Any,
        ranks: Ranks,
        liveness: Liveness,
        *,
        context_tokens: int,
        block_bytes: int,
        scored_at_once_blocks: int | None,
    ) -> None:
        self._manager = tokenizer_manager
        self._ranks = ranks
        self._liveness = liveness
        self._context_tokens = context_tokens
        self._block_bytes = block_bytes
        self._scored_at_once_blocks = scored_at_once_blocks
        self._backlogged = False

    @property
    def context_tokens(self) -> int:
        return self._context_tokens

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    @property
    def scored_at_once_blocks(self) -> int | None:
        return self._scored_at_once_blocks

    # ---- data plane --------------------------------------------------------------------------

    async def open_step(self, step: str, workspace: str) -> None:
        while self._backlogged:  # back-pressure: no new blocks faster than the disk takes them
            await asyncio.sleep(_BACKLOG_POLL_S)
            self._backlogged = any(await self._ranks.call("backlogged"))
        await self._ranks.call("open_step", step=step, workspace=workspace)

    async def promise(self, step: str, view: Sequence[tuple[str, PageSource]]) -> list[int]:
        missing = await self._ranks.call("promise", step=step, view=list(view))
        return sorted(set().union(*missing))

    async def close_step(self, step: str, named: Sequence[tuple[str, int, int]]) -> ClosedStep:
        replies = await self._ranks.call("close_step", step=step, named=list(named))
        self._backlogged = any(reply["backlogged"] for reply in replies)
        return ClosedStep(
            resident=frozenset.intersection(*(frozenset(r["resident"]) for r in replies)),
            host_full=any(reply["refused_pages"] for reply in replies),
            loaded_pages=replies[0]["loaded_pages"],
            stage_in_ms=max(reply["stage_in_ms"] for reply in replies),
        )

    async def watch_queries(self, rid: str, first_position: int) -> None:
        await self._ranks.call("watch", rid=rid, first_position=first_position)

    async def score(
        self,
        rid: str,
        workspace: str,
        candidates: bytes,
        first_positions: bytes,
        query_first: int,
        content_rows: bytes = b"",
    ) -> Scores:
        replies = await self._ranks.call(
            "score",
            rid=rid,
            workspace=workspace,
            candidates=candidates,
            first_positions=first_positions,
            query_first=query_first,
            content_rows=content_rows,
        )
        return scores_of_ranks(replies)

    async def score_runs(
        self, rid: str, workspace: str, content_rows: bytes = b""
    ) -> npt.NDArray[np.float32] | None:
        replies = await self._ranks.call(
            "score_runs", rid=rid, workspace=workspace, content_rows=content_rows
        )
        return runs_of_ranks(replies)

    async def forget(self, workspace: str, blocks: Sequence[int]) -> None:
        await self._ranks.call("forget", workspace=workspace, numbers=list(blocks))

    async def drop_workspace(self, workspace: str) -> None:
        await self._ranks.call("drop_workspace", workspace=workspace)

    async def attach(self, workspace: str, directory: str) -> frozenset[int]:
        replies = await self._ranks.call("attach", workspace=workspace, directory=directory)
        held = [frozenset(numbers) for numbers in replies]
        everywhere = frozenset.intersection(*held)
        somewhere = frozenset().union(*held) - everywhere
        if somewhere:  # its other heads would be computed anew, behind another view
            await self.forget(workspace, sorted(somewhere))
        return everywhere

    async def unsaved_blocks(self, workspace: str) -> int:
        return max(await self._ranks.call("unsaved_blocks", workspace=workspace))

    async def look_ahead(self, workspace: str, blocks: Sequence[int]) -> None:
        await self._ranks.call("look_ahead", workspace=workspace, numbers=list(blocks))

    async def stats(self) -> list[dict[str, int]]:
        return await self._ranks.call("stats")

    async def check_integrity(self) -> None:
        await self._ranks.call("check_integrity")

    async def inspect(self, operation: str, **arguments: Any) -> list[tuple[np.ndarray, Any]]:
        """A tensor that every rank holds ("mean_keys", "block_payload", "queries"), for checks.

        Returns:
            per rank (float32 array, the reply it came in).
        """
        replies = await self._ranks.call(operation, **arguments)
        if any(reply is None for reply in replies):
            raise ControlError(f"{operation}: there is no such thing", hint=f"asked: {arguments}")
        return [
            (np.frombuffer(r["float32"], dtype=np.float32).reshape(r["shape"]), r)
            for r in replies
        ]

    # ---- generation --------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        wanted = request.logprob_token_ids
        sampling = {**request.sampling, "max_new_tokens": request.max_new_tokens}
        body = GenerateReqInput(
            rid=request.rid,
            session_id=request.step,
            extra_key=request.namespace,
            input_ids=list(request.token_ids),
            sampling_params=sampling,
            require_reasoning=sampling.pop("require_reasoning", False),
            stream=True,
        )
        if request.compute_from is not None or wanted is not None:
            # Input log-probabilities from a position on cap the prefix match there.
            body.return_logprob = True
            body.logprob_start_len = (
                request.compute_from if request.compute_from is not None else -1
            )
            body.token_ids_logprob = list(wanted) if wanted is not None else None
        stream = self._manager.generate_request(body, None)
        seen = 0
        finished = False
        try:
            while True:
                try:
                    answer = await self._liveness.guard(anext(stream))
                except StopAsyncIteration:
                    return
                except (ValueError, HTTPException) as error:
                    finished = True
                    raise _as_engine_error(error) from error
                meta = answer["meta_info"]
                reason = meta["finish_reason"]
                finished = reason is not None
                if finished and reason["type"] == "abort":
                    raise _as_engine_error(RuntimeError(reason.get("message", "aborted")))
                tokens = tuple(answer["output_ids"])
                yield Chunk(
                    token_ids=tokens[seen:],
                    finish_reason=reason["type"] if finished else None,
                    cached_tokens=meta["cached_tokens"],
                    logprobs=_logprobs(meta) if wanted is not None else (),
                    matched_stop=reason.get("matched") if finished else None,
                )
                seen = len(tokens)
        finally:
            if not finished:
                self.abort(request.rid)
            with contextlib.suppress(RuntimeError):
                await stream.aclose()

    def abort(self, rid: str) -> None:
        self._manager.abort_request(rid)

    async def flush_device_cache(self) -> None:
        """Empty the engine's prefix tree; workspaces keep their blocks.

        Raises:
            EngineError: the engine stayed busy for five seconds.
        """
        for _ in range(100):
            if (await self._liveness.guard(self._manager.flush_cache())).success:
                return
            await asyncio.sleep(0.05)  # refused while a finished request is still being retired
        raise EngineError("the device cache could not be flushed", hint="the engine is busy")


def _as_engine_error(error: Exception) -> EngineError:
    """SGLang reports a failed load as an aborted request; anything else is the engine's fault."""
    detail = str(getattr(error, "detail", None) or error)
    if detail == FAILED_LOAD_MESSAGE:
        return LoadFailed(detail)
    return EngineError(detail)


def _logprobs(meta: dict[str, Any]) -> tuple[tuple[float, ...], ...]:
    """Per generated token the log-probabilities of the requested ids."""
    rows = meta.get("output_token_ids_logprobs") or ()
    return tuple(tuple(entry[0] for entry in row) for row in rows)
