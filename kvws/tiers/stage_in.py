"""Host → device: filling the pages of an execution view, K rotated to its place in the view."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvws.blocks.key import BLOCK_TOKENS
from kvws.blocks.table import RAW, Residency
from kvws.kernels.place import place_blocks
from kvws.kernels.rerope import rotation_between, scatter_rotated
from kvws.kernels.rotary import RotaryTable, Rotation
from kvws.tiers.device import DevicePool
from kvws.tiers.formats import EXACT
from kvws.tiers.host import HostTier


@dataclass(frozen=True)
class HeldSlice:
    """`length` tokens of a block from its token `offset` on; the block stays where it is."""

    block: Residency
    offset: int
    length: int


@dataclass(frozen=True)
class PageLoad:
    """One view page to fill: its index in the view, the slices that fill it, and its place.

    Attributes:
        device_page: page number in the engine's pool.
    """

    view_index: int
    slices: tuple[HeldSlice, ...]
    device_page: int


LayerFill = Callable[[int], None]
"""Fills some pages of the layer of that number; called for one layer after the other."""

SENT_BYTES = 128 << 20
"""Of a GPU's memory: blocks that were sent there and are not in their pages yet."""


def fill_pages(
    pages: Sequence[PageLoad],
    host: HostTier,
    pool: DevicePool,
    rotary: Sequence[RotaryTable],
    layer_done: Callable[[int], None],
) -> None:
    """Fill device pages layer by layer.

    Pages that are whole blocks go from an exact tier into a pool in CPU memory in one pass, and
    to a GPU some layers at a time, in one piece a block. All others take one packed gather, one
    rotation and one scatter per layer.

    Args:
        pages: every block in their slices has a host copy.
        host: source of the bits.
        pool: Mutated in the pages' slots.
        rotary: the table of each layer.
        layer_done: called with the layer number once its K and V are in place, so that the
            forward pass follows behind the transfer (pipelined stage-in).
    """
    whole, packed = _split(pages, host)
    fills: list[LayerFill] = []
    if whole and pool.k_buffer[0].device.type == "cpu":
        fills.append(_place(whole, host, pool, rotary))
    elif whole:
        fills.append(_send_and_scatter(whole, host, pool, rotary))
    if packed:
        fills.append(_gather_and_scatter(packed, host, pool, rotary))
    for layer in range(len(rotary)):
        for fill in fills:
            fill(layer)
        layer_done(layer)


def _split(
    pages: Sequence[PageLoad], host: HostTier
) -> tuple[list[PageLoad], list[PageLoad]]:
    """Those that are whole blocks as the pool has them, and the others."""
    if host.format != EXACT:
        return [], list(pages)
    whole, packed = list[PageLoad](), list[PageLoad]()
    for page in pages:
        (whole if page.slices[0].length == BLOCK_TOKENS else packed).append(page)
    return whole, packed


def _place(
    pages: Sequence[PageLoad], host: HostTier, pool: DevicePool, rotary: Sequence[RotaryTable]
) -> LayerFill:
    """Whole blocks of an exact tier, in CPU memory on both sides."""
    device_pages = torch.tensor([page.device_page for page in pages])
    slots = torch.tensor([_slot(page.slices[0].block) for page in pages])
    rotations = _rotations(pages, rotary)

    def fill(layer: int) -> None:
        keys, values = host.exact_layer(layer)
        place_blocks(pool.k_buffer[layer], device_pages, keys, slots, rotations[layer])
        place_blocks(pool.v_buffer[layer], device_pages, values, slots, None)

    return fill


def _send_and_scatter(
    pages: Sequence[PageLoad], host: HostTier, pool: DevicePool, rotary: Sequence[RotaryTable]
) -> LayerFill:
    """Whole blocks of an exact tier, to a device with memory of its own.

    The layers of a block's K lie side by side, and so do those of its V: some of them are sent in
    one piece, out of pinned memory as fast as the bus is, and without a copy on the way.
    """
    blocks = [host.exact_block(_slot(page.slices[0].block)) for page in pages]
    device = pool.k_buffer[0].device
    device_slots = _page_tokens([page.device_page for page in pages]).to(device)
    rotations = _rotations(pages, rotary)
    _, layers, *of_layer = blocks[0].shape
    layer_bytes = len(blocks) * 2 * blocks[0][0, 0].nbytes
    at_once = max(1, min(layers, SENT_BYTES // layer_bytes))
    sent = blocks[0].new_empty((2, len(blocks), at_once, *of_layer), device=device)

    def fill(layer: int) -> None:
        place = layer % at_once
        if place == 0:
            group = slice(layer, min(layer + at_once, layers))
            count = group.stop - group.start
            for number, block in enumerate(blocks):
                for side in (0, 1):
                    sent[side, number, :count].copy_(block[side, group], non_blocking=True)
        keys, values = (sent[side, :, place].flatten(0, 1) for side in (0, 1))
        scatter_rotated(pool.k_buffer[layer], device_slots, keys, rotations[layer])
        pool.v_buffer[layer].index_copy_(0, device_slots, values)

    return fill


def _gather_and_scatter(
    pages: Sequence[PageLoad], host: HostTier, pool: DevicePool, rotary: Sequence[RotaryTable]
) -> LayerFill:
    """Slices of any tier and length, to any device."""
    gather = _TokenGather(_slices(pages), host)
    device = pool.k_buffer[0].device
    device_slots = _page_tokens([page.device_page for page in pages]).to(device)
    rotations = _rotations(pages, rotary)

    def fill(layer: int) -> None:
        keys, values = (side.to(device) for side in gather(layer))
        scatter_rotated(pool.k_buffer[layer], device_slots, keys, rotations[layer])
        pool.v_buffer[layer].index_copy_(0, device_slots, values)

    return fill


def _slices(pages: Sequence[PageLoad]) -> list[HeldSlice]:
    return [piece for page in pages for piece in page.slices]


def _rotations(pages: Sequence[PageLoad], rotary: Sequence[RotaryTable]) -> list[Rotation]:
    """Of each layer: from where the tokens' K was baked to their places in the view."""
    baked = _baked_positions(_slices(pages))
    targets = _page_tokens([page.view_index for page in pages])
    tables = {id(table): table for table in rotary}  # layers usually share one
    of_table = {key: _rotation(table, baked, targets) for key, table in tables.items()}
    return [of_table[id(table)] for table in rotary]


def _baked_positions(slices: Sequence[HeldSlice]) -> torch.Tensor:
    """[tokens] int64: where the K of each token was rotated to, or RAW."""
    lengths = torch.tensor([piece.length for piece in slices])
    first = torch.tensor([piece.block.first_position for piece in slices])
    first = first.repeat_interleave(lengths)
    offsets = _ramps([piece.offset for piece in slices], lengths)
    return torch.where(first == RAW, RAW, first + offsets)


def _page_tokens(pages: Sequence[int]) -> torch.Tensor:
    """[32 × pages] int64: the slot of every token of pages."""
    return (torch.tensor(pages)[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)).flatten()


def _rotation(table: RotaryTable, baked: torch.Tensor, targets: torch.Tensor) -> Rotation:
    """From each token's baked position, or from raw K, to its place in the view."""
    baked, targets = baked.to(table.cos.device), targets.to(table.cos.device)
    raw = baked == RAW
    if not raw.any():
        return rotation_between(table, baked, targets)
    turned = rotation_between(table, torch.where(raw, targets, baked), targets)
    placed = rotation_between(table, None, targets)
    column = raw.unsqueeze(1)
    return Rotation(
        cos=torch.where(column, placed.cos, turned.cos),
        sin=torch.where(column, placed.sin, turned.sin),
        interleaved=table.interleaved,
        identity=False,
    )


class _TokenGather:
    """Collects the tokens of slices from the host tier, one layer at a time."""

    def __init__(self, slices: Sequence[HeldSlice], host: HostTier) -> None:
        lengths = torch.tensor([piece.length for piece in slices])
        self._whole_blocks = all(piece.length == BLOCK_TOKENS for piece in slices)
        self._source = host.gather(torch.tensor([_slot(piece.block) for piece in slices]))
        self._token_slices = torch.arange(len(slices)).repeat_interleave(lengths)
        self._token_offsets = _ramps([piece.offset for piece in slices], lengths)

    def __call__(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer, each [tokens, kv_heads, head_dim]."""
        keys, values = self._source(layer)
        if self._whole_blocks:
            return keys.flatten(0, 1), values.flatten(0, 1)
        chosen = (self._token_slices, self._token_offsets)
        return keys[chosen], values[chosen]


def _slot(block: Residency) -> int:
    assert block.slot is not None, "a page is filled from a block without a host copy"
    return block.slot


def _ramps(starts: Sequence[int], lengths: torch.Tensor) -> torch.Tensor:
    """start, start + 1, … of each length, concatenated."""
    first_of_run = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    within_run = torch.arange(int(lengths.sum())) - first_of_run
    return torch.tensor(starts).repeat_interleave(lengths) + within_run
