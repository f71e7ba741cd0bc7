"""Scoring as an engine does it: rows of an index brought to the device, and scored there."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvws.bench.gpu.report import Row
from kvws.bench.gpu.rotary_tables import plain_frequencies, rotary_table
from kvws.engine.scoring_device import KeysOfRank, require_same_scores
from kvws.errors import SelfCheckFailed
from kvws.recall.device_rows import DeviceRows
from kvws.recall.profile import Profile
from kvws.recall.signals.build import SIGNAL_NAMES, KeyGeometry, enabled_signals
from kvws.tiers.geometry import PayloadGeometry

_LAYERS, _QUERY_HEADS, _KV_HEADS, _HEAD_DIM = 4, 8, 2, 64
_ROOM_BLOCKS = 64


def check_device_rows(device: torch.device) -> Iterator[Row]:
    """The check that an engine makes when it starts, with every signal."""
    table = rotary_table(plain_frequencies(_HEAD_DIM, 1e4), 8192, torch.device("cpu"))
    sizes = (_LAYERS, _QUERY_HEADS, _KV_HEADS, _HEAD_DIM)
    profile = Profile("small", *sizes, ((1, 0), (1, 5), (3, 2)), (0, 2), "int8")
    signals = enabled_signals(
        SIGNAL_NAMES, KeyGeometry(_LAYERS, _KV_HEADS, _HEAD_DIM), [table] * _LAYERS, profile
    )
    geometry = PayloadGeometry(_LAYERS, _KV_HEADS, _HEAD_DIM, torch.bfloat16)
    row = Row("check", "step", "rows of an index on the device", passed=True)
    try:
        rows = DeviceRows(signals, device, _ROOM_BLOCKS)
        require_same_scores(signals, rows, KeysOfRank(geometry, _QUERY_HEADS, 512))
    except SelfCheckFailed as error:
        row.passed, row.note = False, str(error)
    yield row
