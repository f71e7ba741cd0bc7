"""Device → host: copying pages to lower tiers ahead of need."""

from __future__ import annotations

import torch

from kvws.tiers.device import DevicePool, paged
from kvws.tiers.host import HostTier


def copy_out(pool: DevicePool, pages: torch.Tensor, host: HostTier, slots: torch.Tensor) -> None:
    """Copy device pages into host slots, bits as they are: one gather per layer and side.

    Args:
        pool: the engine's KV pool.
        pages: [n] int64 device page numbers.
        host: Mutated; owns `slots`.
        slots: [n] int64 slots of staged pages.
    """
    for layer in range(host.geometry.layers):
        for buffer, target in (
            (pool.k_buffer[layer], host.page_keys(layer)),
            (pool.v_buffer[layer], host.page_values(layer)),
        ):
            target.index_copy_(0, slots, paged(buffer).index_select(0, pages))
