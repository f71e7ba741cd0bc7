"""A workspace's index in device memory, and the ways to score a query with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvws.bench.gpu.case import BLOCK_TOKENS, random_normal
from kvws.kernels.dispatch import Implementation
from kvws.kernels.rotary import RotaryTable
from kvws.kernels.rotated_scores import rotated_scores
from kvws.kernels.score import mean_k_scores
from kvws.kernels.token_scores import token_scores

RUN_BLOCKS = 16
"""Consecutive blocks that are looked at together first."""

_FARTHEST = 2048
"""Tokens: the largest distance that is told apart."""


@dataclass(frozen=True)
class Model:
    """The sizes of a model.

    Attributes:
        rotated_layers: layers whose rotated means are kept.
        content_heads: KV heads whose keys are kept token by token, each read by one query head.
        table: its rotary table on a device.
    """

    name: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    rotated_layers: int
    content_heads: int
    table: Callable[[torch.device], RotaryTable]

    @property
    def mean_k_row_bytes(self) -> int:
        """Of a block in the index of Mean-K: a float16 mean of every KV head of every layer."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def default_row_bytes(self) -> int:
        """Of a block in the index of the default signals; runs add a few bytes."""
        rotated = 2 * self.rotated_layers * self.kv_heads * self.head_dim * 3 // 2
        return rotated + self.content_heads * BLOCK_TOKENS * (self.head_dim + 2)


@dataclass(frozen=True)
class Workspace:
    """How much of it there is, and how much of that a step looks at.

    Attributes:
        blocks: whole runs.
        closely: blocks that are scored one by one after runs were.
        tile_blocks: of a tile of the index.
    """

    blocks: int
    closely: int
    tile_blocks: int
    query_tokens: int


class MeanKIndex:
    """The published signal: a mean of every head of every layer."""

    def __init__(self, model: Model, space: Workspace, device: torch.device) -> None:
        before = (model.layers, model.kv_heads)
        self._tiles = [
            random_normal((*before, count, model.head_dim), device, torch.float16, seed=n)
            for n, count in enumerate(_tile_counts(space))
        ]
        every = torch.ones(space.blocks, dtype=torch.bool, device=device)
        self._masks = torch.split(every, _tile_counts(space))
        shape = (model.layers, space.query_tokens, model.query_heads, model.head_dim)
        self._queries = 2 * random_normal(shape, device, torch.float32, seed=99)

    def scores(self, implementation: Implementation = "triton") -> torch.Tensor:
        """[blocks] float32."""
        return mean_k_scores(
            self._queries, self._tiles, self._masks, implementation=implementation
        )


class DefaultIndex:
    """The default signals: rotated means of some layers, token keys of the content heads, and the
    mean keys of runs of blocks in those heads."""

    def __init__(self, model: Model, space: Workspace, device: torch.device) -> None:
        self._space = space
        self._counts = _tile_counts(space)
        self._table = model.table(device)
        before = (model.rotated_layers, model.kv_heads)
        pairs = self._table.rotary_dim // 2
        self._rotated = [
            (
                random_normal((*before, count, model.head_dim), device, torch.float16, seed=n),
                random_normal((*before, count, pairs), device, torch.float16, seed=n).abs_(),
            )
            for n, count in enumerate(self._counts)
        ]
        self._content = [
            (
                random_normal(
                    (model.content_heads, count, BLOCK_TOKENS), device, torch.float16, seed=n
                ).abs_(),
                _codes((model.content_heads, count, BLOCK_TOKENS, model.head_dim), device, n),
            )
            for n, count in enumerate(self._counts)
        ]
        runs = space.blocks // RUN_BLOCKS
        of_runs = (model.content_heads, runs, 1, model.head_dim)
        self._runs = (random_normal(of_runs, device, torch.float16, seed=98),)
        self._every_run = torch.ones(runs, dtype=torch.bool, device=device)
        shape = (model.rotated_layers, space.query_tokens, model.query_heads, model.head_dim)
        self._queries = 2 * random_normal(shape, device, torch.float32, seed=99)
        self._of_content = [
            random_normal((space.query_tokens, 1, model.head_dim), device, torch.float32, seed=n)
            for n in range(model.content_heads)
        ]
        self._offsets = torch.arange(space.query_tokens, device=device)
        away = BLOCK_TOKENS * (torch.arange(space.blocks, device=device).flip(0) + 1)
        self._distances = torch.split(away.clamp(max=_FARTHEST), self._counts)

    def every_block(self) -> torch.Tensor:
        """[blocks] bool."""
        return torch.ones(self._space.blocks, dtype=torch.bool, device=self._offsets.device)

    def shortlist(self, implementation: Implementation = "triton") -> torch.Tensor:
        """[blocks] bool: the blocks of the runs that the query wants most."""
        wanted = token_scores(
            self._of_content, [self._runs], [self._every_run], implementation=implementation
        )
        chosen = torch.zeros_like(self._every_run)
        chosen[wanted.topk(min(len(wanted), self._space.closely // RUN_BLOCKS)).indices] = True
        return chosen.repeat_interleave(RUN_BLOCKS)

    def scores(
        self, candidates: torch.Tensor, implementation: Implementation = "triton"
    ) -> torch.Tensor:
        """Of both signals, each as a share of its largest: [blocks] float32, 0 elsewhere."""
        masks = torch.split(candidates, self._counts)
        rotated = rotated_scores(
            self._queries,
            self._offsets,
            self._rotated,
            masks,
            self._distances,
            [self._table] * len(self._queries),
            implementation=implementation,
        )
        content = token_scores(
            self._of_content, self._content, masks, implementation=implementation
        )
        return rotated / rotated.max() + content / content.max()


def _tile_counts(space: Workspace) -> list[int]:
    full, rest = divmod(space.blocks, space.tile_blocks)
    return [space.tile_blocks] * full + [rest] * (rest > 0)


def _codes(shape: tuple[int, ...], device: torch.device, seed: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(-127, 128, shape, generator=generator, device=device, dtype=torch.int8)
