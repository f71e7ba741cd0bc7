"""Staging a view in out of a large lower tier: from host memory, and from the disk below it.

The blocks of every round are drawn anew from all that the tier holds, and what they are compared
with moves as many bytes of other blocks, drawn in the same way: a cache helps neither side.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from kvws.bench.scale_memory import free_bytes
from kvws.bench.store import Disk, Pair, StageIn
from kvws.errors import ConfigError
from kvws.models.geometry import ModelGeometry
from kvws.store.backend import open_storage
from kvws.store.storage import Backend
from kvws.tiers.geometry import PayloadGeometry
from kvws.tiers.host import HostTier
from kvws.tiers.lift import READ_THREADS, RUN_BLOCKS

_OF_FREE_MEMORY = 0.6
"""Of what the machine can still give: the largest host tier that is made."""

_WRITTEN_AT_ONCE_BLOCKS = 64


@dataclass(frozen=True)
class StageInCost:
    """Medians over the rounds.

    Attributes:
        source: "host" or "disk".
        held_blocks: how many the source holds.
        view_blocks: moved in a round.
        block_bytes: payload of a block.
        ms: of a round; from disk up to the host tier, every checksum verified.
        bytes_per_s: ours.
        bare: what it is compared with.
        bare_bytes_per_s: of that.
        ratio: ours over the bare one, within a round.
    """

    source: str
    held_blocks: int
    view_blocks: int
    block_bytes: int
    ms: float
    bytes_per_s: float
    bare: str
    bare_bytes_per_s: float
    ratio: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def payload_geometry(geometry: ModelGeometry, bits: int) -> PayloadGeometry:
    """KV of a model in so many bits a number: 16 or 32."""
    dtype = {16: torch.float16, 32: torch.float32}[bits]
    return PayloadGeometry(geometry.layers, geometry.kv_heads, geometry.head_dim, dtype)


def most_host_blocks(geometry: PayloadGeometry) -> int:
    """Blocks of the largest host tier that this machine's free memory allows."""
    return int(_OF_FREE_MEMORY * free_bytes()) // geometry.slot_bytes


def measure_host(
    geometry: PayloadGeometry,
    sizes: Sequence[int],
    *,
    view_blocks: int = 64,
    rounds: int = 20,
    progress: Callable[[str], None] = lambda line: None,
    seed: int = 0,
) -> list[StageInCost]:
    """Views out of host tiers of several sizes; those that do not fit are left out, with a line.

    Args:
        sizes: blocks of a host tier, each at least twice `view_blocks`.
    """
    costs: list[StageInCost] = []
    for blocks in sizes:
        most = most_host_blocks(geometry)
        if blocks > most:
            progress(f"left out: {blocks:,} blocks in host memory, which has room for {most:,}")
            continue
        _require_room_to_draw(blocks, view_blocks)
        progress(f"{blocks:,} blocks in host memory")
        costs.append(_measure_host(geometry, blocks, view_blocks, rounds, seed))
    return costs


def _measure_host(
    geometry: PayloadGeometry, blocks: int, view_blocks: int, rounds: int, seed: int
) -> StageInCost:
    rng = random.Random(seed)  # noqa: S311 (not for secrets)
    host, slots = filled_host(geometry, blocks)
    stage_in, copied = StageIn(host, view_blocks), _Copied(host, view_blocks)
    pair = Pair()
    for number in range(rounds + 1):
        drawn = rng.sample(slots, 2 * view_blocks)
        stage_in.draw(drawn[:view_blocks], rng)
        copied.draw(drawn[view_blocks:])
        if number == 0:  # the first writes of memory are not measured
            stage_in.fill()
            copied.copy()
        else:
            pair.run(stage_in.fill, copied.copy)
    return _cost("host", "memcpy", blocks, view_blocks, geometry, pair)


def measure_disk(
    geometry: PayloadGeometry,
    directory: Path,
    stored_blocks: int,
    *,
    view_blocks: int = 64,
    rounds: int = 10,
    backend: Backend = "auto",
    progress: Callable[[str], None] = lambda line: None,
    seed: int = 0,
) -> StageInCost:
    """Views out of a store of so many blocks, as cold as the operating system lets it be.

    Raises:
        ConfigError: the host memory that the blocks are written from is not there.
    """
    _require_room_to_draw(stored_blocks, view_blocks)
    most = most_host_blocks(geometry)
    if stored_blocks > most:
        raise ConfigError(
            f"{stored_blocks:,} blocks are written from memory, which has room for {most:,}",
            hint="store fewer",
        )
    rng = random.Random(seed)  # noqa: S311 (not for secrets)
    progress(f"{stored_blocks:,} blocks in {directory}")
    host, slots = filled_host(geometry, stored_blocks)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=directory) as scratch:
        storage = open_storage(directory, backend)
        disk = Disk(Path(scratch), storage, host, slots, READ_THREADS, RUN_BLOCKS)
        disk.put()
        disk.raw_write()
        pair = Pair()
        for _ in range(rounds):
            drawn = rng.sample(range(stored_blocks), 2 * view_blocks)
            disk.forget_cached()
            pair.run(
                partial(disk.read, drawn[:view_blocks]),
                partial(disk.raw_read, drawn[view_blocks:]),
            )
        disk.close()
    return _cost("disk", "raw reads", stored_blocks, view_blocks, geometry, pair)


def filled_host(geometry: PayloadGeometry, blocks: int) -> tuple[HostTier, list[int]]:
    """A host tier all of whose memory is written to, and its slots."""
    host = HostTier(geometry, blocks * geometry.slot_bytes)
    slots = host.allocate(blocks)
    some_blocks = (_WRITTEN_AT_ONCE_BLOCKS, *geometry.shape)
    payloads = torch.arange(math.prod(some_blocks)).sin().to(geometry.dtype).view(some_blocks)
    for begin in range(0, blocks, _WRITTEN_AT_ONCE_BLOCKS):
        some = torch.tensor(slots[begin : begin + _WRITTEN_AT_ONCE_BLOCKS])
        host.write(some, payloads[: len(some)])
    return host, slots


class _Copied:
    """As many bytes as a view has, copied as they are."""

    def __init__(self, host: HostTier, view_blocks: int) -> None:
        self._host = host
        self._block_bytes = host.geometry.block_bytes
        self._target = torch.zeros((view_blocks, self._block_bytes), dtype=torch.uint8)
        self._sources: list[torch.Tensor] = []

    def draw(self, slots: Sequence[int]) -> None:
        self._sources = [
            torch.frombuffer(self._host.sectors(slot), dtype=torch.uint8)[: self._block_bytes]
            for slot in slots
        ]

    def copy(self) -> None:
        for target, source in zip(self._target, self._sources, strict=True):
            target.copy_(source)


def _require_room_to_draw(blocks: int, view_blocks: int) -> None:
    if blocks < 2 * view_blocks:
        raise ConfigError(
            f"{blocks} blocks are too few to draw two times {view_blocks} from",
            hint=f"measure with {2 * view_blocks} blocks or more",
        )


def _cost(
    source: str,
    bare: str,
    held_blocks: int,
    view_blocks: int,
    geometry: PayloadGeometry,
    pair: Pair,
) -> StageInCost:
    size_bytes = view_blocks * geometry.block_bytes
    bytes_per_s, bare_bytes_per_s, ratio = pair.rates(size_bytes)
    return StageInCost(
        source=source,
        held_blocks=held_blocks,
        view_blocks=view_blocks,
        block_bytes=geometry.block_bytes,
        ms=1e3 * size_bytes / bytes_per_s,
        bytes_per_s=bytes_per_s,
        bare=bare,
        bare_bytes_per_s=bare_bytes_per_s,
        ratio=ratio,
    )


def stage_in_table(costs: Sequence[StageInCost]) -> Table:
    """One row a source and size."""
    table = Table(box=None, header_style="bold")
    for name in ("source", "it holds", "GB", "blocks", "ms", "MB/s", "MB/s bare", "bare", "ratio"):
        table.add_column(name, justify="left" if name in ("source", "bare") else "right")
    for cost in costs:
        table.add_row(
            cost.source,
            f"{cost.held_blocks:,}",
            f"{cost.held_blocks * cost.block_bytes / 1e9:,.1f}",
            f"{cost.view_blocks:,}",
            f"{cost.ms:,.1f}",
            f"{cost.bytes_per_s / 1e6:,.0f}",
            f"{cost.bare_bytes_per_s / 1e6:,.0f}",
            cost.bare,
            f"{cost.ratio:.0%}",
        )
    return table
