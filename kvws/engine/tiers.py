"""Opening the tiers below the device in an engine process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvws.blocks.key import BLOCK_TOKENS
from kvws.errors import ConfigError
from kvws.kernels.rotary import RotaryTable, tables_on
from kvws.recall.profile import Profile
from kvws.recall.signals.build import KeyGeometry, enabled_signals
from kvws.recall.signals.enabled import EnabledSignals
from kvws.store.backend import open_storage
from kvws.store.storage import Backend
from kvws.tiers.budget import DiskBudget
from kvws.tiers.codec import PayloadCodec, make_codec
from kvws.tiers.disk import DiskTier
from kvws.tiers.geometry import PayloadGeometry
from kvws.tiers.host import HostTier


@dataclass(frozen=True)
class TierSettings:
    """Sizes and formats, per rank, as they travel to the engine processes.

    Attributes:
        host_bytes: capacity of the host tier.
        host_format: how payloads lie there, one of `kvws.tiers.codec.PAYLOAD_FORMATS`.
        disk_dir: the store directory, which the front process owns; "" without a disk tier.
        disk_bytes: capacity of the disk tier over all ranks and workspaces.
        disk_format: how payloads lie on disk.
        disk_backend: what moves them.
    """

    host_bytes: int
    host_format: str = "exact"
    disk_dir: str = ""
    disk_bytes: int = 0
    disk_format: str = "exact"
    disk_backend: Backend = "auto"


def open_host(
    tiers: TierSettings,
    geometry: PayloadGeometry,
    rotary: Sequence[RotaryTable],
    *,
    context_tokens: int,
    running_requests: int,
) -> HostTier:
    """The host tier of a rank.

    Args:
        context_tokens: longest prompt and generation of a request.
        running_requests: at once; each may stage a whole context.

    Raises:
        ConfigError: the format is unknown, or the tier too small to work with.
    """
    context_blocks = -(-context_tokens // BLOCK_TOKENS)
    codec = _codec(tiers.host_format, geometry, rotary)
    staged_pages = running_requests * context_blocks
    host = HostTier(geometry, tiers.host_bytes, codec, staged_pages=staged_pages)
    smallest = 2 * context_blocks  # a view, and the pages computed behind it
    if host.capacity_blocks < smallest:
        needed_bytes = smallest * codec.payload_bytes
        if not host.pages_become_blocks_in_place:
            needed_bytes += staged_pages * geometry.slot_bytes
        raise ConfigError(
            f"a host tier of {host.capacity_blocks} blocks is too small for requests of "
            f"{context_tokens} tokens",
            hint=f"raise --host-gb to {needed_bytes / (1 << 30) + 0.005:.2f}, or lower --budget "
            "and --reserve",
        )
    return host


def open_signals(
    names: Sequence[str],
    profile: str,
    geometry: PayloadGeometry,
    rotary: Sequence[RotaryTable],
    *,
    rank: int,
    ranks: int,
) -> EnabledSignals:
    """What the blocks of a rank are found by.

    Args:
        names: of the signals.
        profile: text of the model's retrieval profile; "" without one.

    Raises:
        ConfigError: a name is unknown, or needs a profile, or the profile is of another model.
    """
    return enabled_signals(
        names,
        KeyGeometry(geometry.layers, geometry.kv_heads, geometry.head_dim, rank, ranks),
        tables_on(rotary, torch.device("cpu")),
        Profile.from_json(profile) if profile else None,
    )


def open_disk(
    tiers: TierSettings,
    host: HostTier,
    rotary: Sequence[RotaryTable],
    signals: EnabledSignals,
    *,
    rank: int,
    ranks: int,
) -> DiskTier | None:
    """The disk tier of a rank; None when there is none.

    Raises:
        ConfigError: the format is unknown, or the backend cannot work in the directory.
    """
    if not tiers.disk_dir:
        return None
    root = Path(tiers.disk_dir)
    storage = open_storage(root, tiers.disk_backend)
    return DiskTier(
        host,
        _codec(tiers.disk_format, host.geometry, rotary),
        DiskBudget(tiers.disk_bytes // ranks, root, rank),
        storage,
        signals,
        rank=rank,
    )


def _codec(
    format: str, geometry: PayloadGeometry, rotary: Sequence[RotaryTable]
) -> PayloadCodec:
    """A codec for payloads in host memory, wherever the engine's tables are."""
    return make_codec(format, geometry, tables_on(rotary, torch.device("cpu")))
