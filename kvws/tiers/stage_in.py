"""Host → device: filling the pages of an execution view, K rotated to its place in the view."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvws.blocks.key import BLOCK_TOKENS
from kvws.kernels.rerope import rotation_between, scatter_rotated
from kvws.kernels.rotary import RotaryTable
from kvws.tiers.device import DevicePool
from kvws.tiers.host import HostTier


@dataclass(frozen=True)
class HostSlice:
    """A slice of a block, resolved: where its tokens lie and where their K was baked.

    `first_position` is the baked position of the slice's own first token.
    """

    slot: int
    offset: int
    length: int
    first_position: int


@dataclass(frozen=True)
class PageLoad:
    """One view page to fill: its index in the view and the slices that fill it."""

    view_index: int
    slices: tuple[HostSlice, ...]


def fill_pages(
    pages: Sequence[PageLoad],
    device_slots: torch.Tensor,
    host: HostTier,
    pool: DevicePool,
    rotary: Sequence[RotaryTable],
    layer_done: Callable[[int], None],
) -> None:
    """Fill device slots layer by layer: one packed gather, one rotation and scatter per layer.

    Args:
        pages: the pages, in the order of `device_slots`.
        device_slots: [32 × pages] int64.
        host: source of the bits.
        pool: Mutated in `device_slots`.
        rotary: the table of each layer.
        layer_done: called with the layer number once its K and V are in place, so that the
            forward pass follows behind the transfer (pipelined stage-in).
    """
    gather = _TokenGather(pages)
    view_pages = torch.tensor([page.view_index for page in pages])
    targets = (view_pages[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)).flatten()
    rotations = {
        id(table): rotation_between(table, gather.baked_positions, targets) for table in rotary
    }
    for layer, table in enumerate(rotary):
        keys = gather(host.keys(layer))
        scatter_rotated(pool.k_buffer[layer], device_slots, keys, rotations[id(table)])
        pool.v_buffer[layer].index_copy_(0, device_slots, gather(host.values(layer)))
        layer_done(layer)


class _TokenGather:
    """Collects the tokens of view pages from the host tier, one layer at a time.

    Attributes:
        baked_positions: [tokens] int64, where the K of each gathered token was rotated to.
    """

    def __init__(self, pages: Sequence[PageLoad]) -> None:
        slices = [piece for page in pages for piece in page.slices]
        lengths = torch.tensor([piece.length for piece in slices])
        self._whole_blocks = all(piece.length == BLOCK_TOKENS for piece in slices)
        self._slots = torch.tensor([piece.slot for piece in slices])
        self._token_slots = self._slots.repeat_interleave(lengths)
        self._token_offsets = _ramps([piece.offset for piece in slices], lengths)
        self.baked_positions = _ramps([piece.first_position for piece in slices], lengths)

    def __call__(self, payload: torch.Tensor) -> torch.Tensor:
        """[slots, 32, kv_heads, head_dim] → [tokens, kv_heads, head_dim]."""
        if self._whole_blocks:
            return payload.index_select(0, self._slots).flatten(0, 1)
        return payload[self._token_slots, self._token_offsets]


def _ramps(starts: Sequence[int], lengths: torch.Tensor) -> torch.Tensor:
    """start, start + 1, … of each length, concatenated."""
    first_of_run = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    within_run = torch.arange(int(lengths.sum())) - first_of_run
    return torch.tensor(starts).repeat_interleave(lengths) + within_run
