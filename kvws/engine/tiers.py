"""Opening the tiers below the device in an engine process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvws.kernels.rotary import RotaryTable
from kvws.store.backend import Backend, open_storage
from kvws.tiers.budget import DiskBudget
from kvws.tiers.codec import make_codec
from kvws.tiers.disk import DiskTier
from kvws.tiers.host import HostTier


@dataclass(frozen=True)
class TierSettings:
    """Sizes and formats, per rank, as they travel to the engine processes.

    Attributes:
        host_bytes: capacity of the host tier.
        disk_dir: the store directory, which the front process owns; "" without a disk tier.
        disk_bytes: capacity of the disk tier over all ranks and workspaces.
        disk_format: how payloads lie on disk, one of `kvws.tiers.codec.PAYLOAD_FORMATS`.
        disk_backend: what moves them.
    """

    host_bytes: int
    disk_dir: str = ""
    disk_bytes: int = 0
    disk_format: str = "exact"
    disk_backend: Backend = "auto"


def open_disk(
    tiers: TierSettings,
    host: HostTier,
    rotary: Sequence[RotaryTable],
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
        make_codec(tiers.disk_format, host.geometry, rotary),
        DiskBudget(tiers.disk_bytes // ranks, root, rank),
        storage,
        rank=rank,
    )
