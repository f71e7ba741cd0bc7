"""What the machine gives at most: every other figure is told as a share of one of these."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvws.bench.gpu.clock import Clock
from kvws.bench.gpu.report import Row

_COPIED_BYTES = 1 << 30


@dataclass(frozen=True)
class Ceilings:
    """GB/s (10⁹ bytes); of a copy on the device, bytes read and bytes written count both."""

    device_copy: float
    host_to_device: float
    device_to_host: float


def measure_ceilings(clock: Clock) -> tuple[Ceilings, list[Row]]:
    """Large copies, by one command each."""
    here, there = (
        torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=clock.device) for _ in range(2)
    )
    pinned = torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    pinned.fill_(1)
    rows: list[Row] = []
    for name, target, source, moved in (
        ("device copy", there, here, 2 * _COPIED_BYTES),
        ("pinned host to device", here, pinned, _COPIED_BYTES),
        ("device to pinned host", pinned, here, _COPIED_BYTES),
    ):
        row = Row("ceiling", name, f"{_COPIED_BYTES >> 20} MiB")

        def copy(target: torch.Tensor = target, source: torch.Tensor = source) -> None:
            target.copy_(source, non_blocking=True)

        row.took(clock.device_ms(copy), moved)
        rows.append(row)
    device_copy, up, down = (row.gb_per_s or 0.0 for row in rows)
    return Ceilings(device_copy, up, down), rows
