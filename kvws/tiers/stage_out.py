"""Device → host: copying pages to lower tiers ahead of need."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvws.tiers.device import DevicePool, paged
from kvws.tiers.host import HostTier


def copy_out(
    pool: DevicePool, pages: Sequence[int], host: HostTier, slots: Sequence[int]
) -> None:
    """Copy device pages into host slots, bits as they are.

    Pages and slots that ascend together are copied in one piece per layer and side.

    Args:
        pool: the engine's KV pool.
        pages: device page numbers.
        host: Mutated; owns `slots`.
        slots: of staged pages, one a page.
    """
    runs = _runs(pages, slots)
    for layer in range(host.geometry.layers):
        for buffer, target in (
            (pool.k_buffer[layer], host.page_keys(layer)),
            (pool.v_buffer[layer], host.page_values(layer)),
        ):
            source = paged(buffer)
            for page, slot, count in runs:
                copied = source[page : page + count]
                target[slot : slot + count].copy_(copied, non_blocking=True)
    if pool.k_buffer[0].is_cuda:  # one wait for all layers; the slots hold the bits after it
        torch.cuda.current_stream().synchronize()


def _runs(pages: Sequence[int], slots: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first page, first slot, count) of the stretches in which both ascend by one."""
    runs: list[tuple[int, int, int]] = []
    for page, slot in zip(pages, slots, strict=True):
        if runs:
            first_page, first_slot, count = runs[-1]
            if (page, slot) == (first_page + count, first_slot + count):
                runs[-1] = (first_page, first_slot, count + 1)
                continue
        runs.append((page, slot, 1))
    return runs
