"""Opening the tiers of a rank: what does not fit together is refused with a way out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvws.engine.tiers import TierSettings, open_disk, open_host
from kvws.errors import ConfigError
from kvws.tiers.geometry import PayloadGeometry
from kvws.tiers.host import HostTier
from tests.plane.rig import DIM, KV_HEADS, LAYERS, rotary_table, signals_of

GEOMETRY = PayloadGeometry(LAYERS, KV_HEADS, DIM, torch.float32)
TABLES = [rotary_table(100.0)] * LAYERS
SIGNALS = signals_of(TABLES, "mean-k")


def host(tiers: TierSettings) -> HostTier:
    return open_host(tiers, GEOMETRY, TABLES, context_tokens=320, running_requests=4)


def test_a_host_tier_holds_a_view_and_the_pages_behind_it_or_is_refused() -> None:
    assert host(TierSettings(20 * GEOMETRY.slot_bytes)).capacity_blocks == 20
    with pytest.raises(ConfigError, match="19 blocks is too small") as refused:
        host(TierSettings(19 * GEOMETRY.slot_bytes))
    assert "--host-gb" in refused.value.hint and "--budget" in refused.value.hint


def test_a_quantised_host_tier_keeps_room_for_pages_that_wait_to_be_encoded() -> None:
    tier = host(TierSettings(100 * GEOMETRY.slot_bytes, host_format="int8"))
    assert tier.format == "int8" and tier.capacity_blocks > 60
    with pytest.raises(ConfigError) as refused:
        host(TierSettings(41 * GEOMETRY.slot_bytes, host_format="int8"))
    assert "--host-gb" in refused.value.hint


def test_the_disk_budget_is_shared_out_over_the_ranks(tmp_path: Path) -> None:
    tiers = TierSettings(20 * GEOMETRY.slot_bytes, disk_dir=str(tmp_path), disk_bytes=1 << 20)
    disk = open_disk(tiers, host(tiers), TABLES, SIGNALS, rank=1, ranks=4)
    assert disk is not None and disk.budget.capacity_bytes == 1 << 18


def test_without_a_folder_there_is_no_disk() -> None:
    tiers = TierSettings(20 * GEOMETRY.slot_bytes)
    assert open_disk(tiers, host(tiers), TABLES, SIGNALS, rank=0, ranks=1) is None
