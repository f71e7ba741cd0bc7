"""A data plane over a small pool, for each kind of pool."""

from __future__ import annotations

import pytest
import torch

from kvws.engine.data_plane import DataPlane
from kvws.tiers.geometry import PayloadGeometry
from kvws.tiers.host import HostTier
from tests.plane.rig import (
    DIM,
    HOST_BLOCKS,
    KV_HEADS,
    LAYERS,
    Pool,
    Rig,
    rotary_table,
    signals_of,
)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def rig(dtype: torch.dtype) -> Rig:
    torch.manual_seed(11)
    pool = Pool.random(dtype)
    shared = rotary_table(100.0)
    tables = [shared, rotary_table(10.0), shared]
    geometry = PayloadGeometry(LAYERS, KV_HEADS, DIM, dtype)
    host = HostTier(geometry, HOST_BLOCKS * geometry.slot_bytes)
    plane = DataPlane(pool, tables, host, signals_of(tables, "mean-k", "rotated-mean", "content"))
    return Rig(pool, tables, plane)
