"""How the rest of kvws sees an engine. Nothing here imports SGLang."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvws.blocks.page import PageSource


@dataclass(frozen=True)
class GenerateRequest:
    """One ordinary engine request.

    Attributes:
        rid: request id, "<step>.<attempt>": loads are accounted to the step by it.
        step: the open step that the request's pages are staged under.
        namespace: the engine's `extra_key`.
        token_ids: the prompt.
        max_new_tokens: 0 prefills only.
        compute_from: compute every row from this position on, even if the tree has its page.
        sampling: further sampling parameters, as the engine spells them.
        logprob_token_ids: report the log-probability of these ids at each generated token.
    """

    rid: str
    step: str | None
    namespace: str
    token_ids: Sequence[int]
    max_new_tokens: int
    compute_from: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    logprob_token_ids: Sequence[int] | None = None


@dataclass(frozen=True)
class Chunk:
    """Part of an answer.

    Attributes:
        token_ids: tokens generated since the last chunk.
        finish_reason: None until the last chunk.
        cached_tokens: leading prompt tokens that were not computed.
        logprobs: [tokens so far][requested ids], natural log; empty unless asked for.
        matched_stop: the token id or the text that ended the answer, with reason "stop".
    """

    token_ids: tuple[int, ...]
    finish_reason: str | None
    cached_tokens: int
    logprobs: tuple[tuple[float, ...], ...] = ()
    matched_stop: int | str | None = None


@dataclass(frozen=True)
class Scores:
    """What a probe says of every block of the workspace.

    Attributes:
        rows: query tokens whose Q was tapped; without any there are no scores.
        by_signal: by the signal's name, [blocks]; 0 for blocks that did not compete. "mean-k" is
            the paper's R_b; the others are sums over all heads.
    """

    rows: int
    by_signal: Mapping[str, npt.NDArray[np.float32]]


@dataclass(frozen=True)
class ClosedStep:
    """What the ranks kept of a step.

    Attributes:
        resident: numbers of the named blocks that every rank holds.
        host_full: some rank had no room for a computed page.
        loaded_pages: pages that were staged in for the step.
        stage_in_ms: time the slowest rank spent filling them.
    """

    resident: frozenset[int]
    host_full: bool
    loaded_pages: int
    stage_in_ms: float


class Engine(Protocol):
    """A model behind a KV workspace data plane."""

    @property
    def context_tokens(self) -> int:
        """Longest prompt + generation of one request."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all ranks."""
        ...

    @property
    def scored_at_once_blocks(self) -> int | None:
        """Blocks whose index rows fit a GPU's memory together: more of them are scored on the
        CPU, which takes seconds. None without a GPU."""
        ...

    async def open_step(self, step: str, workspace: str) -> None: ...

    async def promise(self, step: str, view: Sequence[tuple[str, PageSource]]) -> list[int]:
        """Commit a view; returns blocks that a rank lacks (then nothing was promised)."""
        ...

    async def close_step(
        self, step: str, named: Sequence[tuple[str, int, int]]
    ) -> ClosedStep: ...

    async def forget(self, workspace: str, blocks: Sequence[int]) -> None:
        """Drop the bytes of blocks on every rank, durably."""
        ...

    async def drop_workspace(self, workspace: str) -> None:
        """Drop a workspace's blocks and index on every rank."""
        ...

    async def attach(self, workspace: str, directory: str) -> frozenset[int]:
        """Open a workspace's folder on every rank.

        Returns:
            the blocks that every rank holds durably, with their index rows. What only some ranks
            held is dropped.
        """
        ...

    async def unsaved_blocks(self, workspace: str) -> int:
        """Blocks that some rank has not made durable yet; 0 without a disk tier."""
        ...

    async def look_ahead(self, workspace: str, blocks: Sequence[int]) -> None:
        """Begin to bring blocks from disk to host memory, the likeliest to be needed first."""
        ...

    async def watch_queries(self, rid: str, first_position: int) -> None:
        """Tap the Q of request `rid` from a position on, until its step closes."""
        ...

    async def score(
        self,
        rid: str,
        workspace: str,
        candidates: bytes,
        first_positions: bytes,
        query_first: int,
        content_rows: bytes = b"",
    ) -> Scores:
        """Score every block for the watched queries of a request.

        Args:
            candidates: one byte per block, non-zero where it competes.
            first_positions: little-endian int32 per block: of its first token in its line.
            query_first: position of the query's first token in the line that it continues.
            content_rows: one byte per query token, non-zero where it counts for content; empty
                for all.
        """
        ...

    async def score_runs(
        self, rid: str, workspace: str, content_rows: bytes = b""
    ) -> npt.NDArray[np.float32] | None:
        """Score runs of RUN_BLOCKS block numbers, which costs a hundredth of `score`.

        Args:
            content_rows: as for `score`.

        Returns:
            [runs]; None where no signal tells them apart, or no queries were tapped.
        """
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Stream an answer.

        Raises:
            LoadFailed: a promised page could not be filled.
            EngineDied: the engine's process is gone.
        """
        ...

    def abort(self, rid: str) -> None: ...

    async def stats(self) -> list[dict[str, int]]:
        """Counters of each rank."""
        ...

    async def check_integrity(self) -> None: ...
