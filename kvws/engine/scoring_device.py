"""Where a rank's blocks are scored: in an accelerator's memory, if there is one that can."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from kvws.blocks.key import BLOCK_TOKENS
from kvws.errors import ConfigError, SelfCheckFailed
from kvws.recall.device_rows import DeviceRows
from kvws.recall.index import BlockIndex
from kvws.recall.signals.enabled import EnabledSignals, raw_keys
from kvws.tiers.geometry import PayloadGeometry

logger = logging.getLogger(__name__)

_MOST_BYTES = 4 << 30
"""Taken unasked: a million tokens and more of models with eight billion parameters."""

_SHARE_OF_FREE = 4
"""Of what the engine left free, a fourth: the rest is for what its forward passes need."""

_VIEWS = 4
"""Blocks of so many contexts must fit, or a step could not choose among enough of them."""

_CHECK_BLOCKS = 40
_CHECK_QUERY_TOKENS = 5
_TOLERANCE = 1e-2
"""Of the largest score. A CPU may round queries to 8 bits, a GPU products to 10."""


@dataclass(frozen=True)
class ScoringDevice:
    """Where a rank scores.

    Attributes:
        rows: None where blocks are scored in host memory.
        description: for people; "" where there is no choice.
    """

    rows: DeviceRows | None
    description: str


@dataclass(frozen=True)
class KeysOfRank:
    """What a rank's queries and keys are like.

    Attributes:
        geometry: of its blocks.
        query_heads: of this rank.
        context_tokens: longest prompt and generation of a request.
    """

    geometry: PayloadGeometry
    query_heads: int
    context_tokens: int


def open_scoring_device(
    signals: EnabledSignals, device: torch.device, index_bytes: int | None, keys: KeysOfRank
) -> ScoringDevice:
    """Take memory for index rows on the engine's device, and check that scores are right there.

    Args:
        index_bytes: how much; 0 for none; None for a part of what is free, and none if scores
            turn out wrong there.

    Raises:
        ConfigError: memory was asked for by name that is not there, or is too small to work with.
        SelfCheckFailed: it was asked for, and scores differ there.
    """
    if device.type == "cpu":
        if index_bytes:
            raise ConfigError(
                "index_gb is memory of a GPU, and the engine runs on a CPU",
                hint="leave --index-gb out: blocks are scored in host memory",
            )
        return ScoringDevice(None, "")
    if index_bytes == 0:
        return ScoringDevice(None, "on the CPU, as --index-gb 0 asks")
    free_bytes, _ = torch.cuda.mem_get_info(device)
    wanted_bytes = min(_MOST_BYTES, free_bytes // _SHARE_OF_FREE)
    try:
        rows = _open(signals, device, index_bytes or wanted_bytes, free_bytes, keys)
    except Exception as error:  # a compiler's, a driver's: whatever it is, the CPU can score
        if index_bytes is not None:
            raise
        logger.warning("blocks are scored on the CPU: %s", error)
        return ScoringDevice(None, f"on the CPU, since on {device} {error}")
    return ScoringDevice(rows, f"on {device}, up to {rows.capacity_blocks:,} blocks at once")


def _open(
    signals: EnabledSignals,
    device: torch.device,
    index_bytes: int,
    free_bytes: int,
    keys: KeysOfRank,
) -> DeviceRows:
    capacity_blocks = index_bytes // signals.row_bytes
    smallest_blocks = _VIEWS * -(-keys.context_tokens // BLOCK_TOKENS)
    if capacity_blocks < smallest_blocks:
        needed_bytes = smallest_blocks * signals.row_bytes
        raise ConfigError(
            f"{index_bytes / 2**30:.2f} GiB hold the index rows of {capacity_blocks} blocks, and "
            f"a step needs {smallest_blocks}",
            hint=f"set --index-gb to {needed_bytes / 2**30 + 0.005:.2f} or more, or to 0",
        )
    if index_bytes > free_bytes:
        raise ConfigError(
            f"{index_bytes / 2**30:.2f} GiB for index rows were asked for, and "
            f"{free_bytes / 2**30:.2f} GiB are free beside the engine",
            hint="lower --index-gb, or set it to 0",
        )
    rows = DeviceRows(signals, device, capacity_blocks)
    require_same_scores(signals, rows, keys)
    return rows


def require_same_scores(signals: EnabledSignals, rows: DeviceRows, keys: KeysOfRank) -> None:
    """Score some random blocks there and in host memory.

    Raises:
        SelfCheckFailed: the scores are others.
    """
    shape, tokens = keys.geometry, _CHECK_BLOCKS * BLOCK_TOKENS
    random = torch.Generator().manual_seed(1)
    raw = torch.randn(
        (shape.layers, tokens, shape.kv_heads, shape.head_dim), generator=random
    )
    queries = torch.randn(
        (shape.layers, _CHECK_QUERY_TOKENS, keys.query_heads, shape.head_dim), generator=random
    )
    first_positions = torch.arange(0, tokens, BLOCK_TOKENS)
    candidates = torch.rand(_CHECK_BLOCKS, generator=random) < 0.8
    of_blocks = signals.rows(raw_keys(raw), first_positions)
    found: list[dict[str, torch.Tensor]] = []
    for near in (None, rows):
        index = BlockIndex(signals, near)
        index.write(range(_CHECK_BLOCKS), of_blocks)
        scores = index.score(queries, first_positions, tokens, candidates)
        runs = index.score_runs(queries)
        found.append(scores if runs is None else {**scores, "runs": runs})
        index.release()
    for name, expected in found[0].items():
        largest = float(expected.abs().max()) or 1.0
        difference = float((found[1][name] - expected).abs().max()) / largest
        if not difference <= _TOLERANCE:  # NaN is no agreement
            raise SelfCheckFailed(
                f"scores by {name} differ by {difference:.2g} of the largest",
                hint="start with --index-gb 0, and report the GPU",
            )
