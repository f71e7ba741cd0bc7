"""A view's blocks from pinned host memory into the pages of a KV pool, keys rotated on the way."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kvws.bench.gpu.case import BLOCK_TOKENS, random_normal
from kvws.bench.gpu.step_index import Model
from kvws.kernels.dispatch import Implementation
from kvws.kernels.rerope import Rotation, rotation_between, scatter_rotated

_BUFFERS = 2


@dataclass(frozen=True)
class Chosen:
    """Blocks of a view, in its order.

    Attributes:
        slots: [n] int64 on the CPU: where in host memory each lies; distinct.
        rotation: of their tokens, from where they were baked to their place in the view.
    """

    slots: torch.Tensor
    rotation: Rotation


class HostSlab:
    """Payloads in pinned memory, a block's all together: [slots, 2, layers, BLOCK_TOKENS,
    kv_heads, head_dim] bfloat16. A slot differs from the others in its first dimension."""

    def __init__(self, model: Model, slots: int, *, pinned: bool) -> None:
        of_block = (2, model.layers, BLOCK_TOKENS, model.kv_heads, model.head_dim)
        shape = (slots, *of_block)
        self.payloads = torch.empty(shape, dtype=torch.bfloat16, pin_memory=pinned)
        pattern = random_normal(of_block, torch.device("cpu"), torch.bfloat16)
        for slot, payload in enumerate(self.payloads):
            payload.copy_(pattern)
            payload[..., 0] = slot % 251

    @property
    def slots(self) -> int:
        return len(self.payloads)

    @property
    def block_bytes(self) -> int:
        return self.payloads[0].nbytes


class ViewPages:
    """The pages that a view occupies in the engine's pool, and the buffers on the way there.

    Page i holds block i of the view; a real view's pages lie anywhere, which costs the same.
    """

    def __init__(self, model: Model, host: HostSlab, blocks: int, device: torch.device) -> None:
        self.model, self.host, self.blocks = model, host, blocks
        tokens = blocks * BLOCK_TOKENS
        row = (model.kv_heads, model.head_dim)
        dtype = host.payloads.dtype
        shape = (model.layers, tokens, *row)
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in "kv")
        self._rows = torch.arange(tokens, device=device)
        self._table = model.table(device)
        of_layer = (_BUFFERS, 2, blocks, BLOCK_TOKENS, *row)
        pinned = host.payloads.is_pinned()
        self._collected = torch.empty(of_layer, dtype=dtype, pin_memory=pinned)
        self._arrived = torch.empty(of_layer, dtype=dtype, device=device)
        self._whole = torch.empty((blocks, *host.payloads.shape[1:]), dtype=dtype, device=device)
        self._lane = _CopyLane(device)

    def chosen(self, blocks: torch.Tensor) -> Chosen:
        """Where the chosen blocks are. Host memory holds fewer than the workspace has, so block
        numbers are folded onto its slots, without two on one.

        Args:
            blocks: [n] int64 on the CPU, distinct.
        """
        first = int(blocks[0]) if len(blocks) else 0
        order = torch.randperm(self.host.slots, generator=torch.Generator().manual_seed(first))
        baked = blocks * 7919 % (self._table.max_position // BLOCK_TOKENS) * BLOCK_TOKENS
        positions = (baked.unsqueeze(1) + torch.arange(BLOCK_TOKENS)).flatten()
        moved = positions.to(self._rows.device)
        return Chosen(order[: len(blocks)], rotation_between(self._table, moved, self._rows))

    def collect(self, chosen: Chosen, layer: int) -> None:
        """One layer's keys and values from all over host memory into a pinned buffer."""
        for side, out in enumerate(self._collected[layer % _BUFFERS]):
            torch.index_select(self.host.payloads[:, side, layer], 0, chosen.slots, out=out)

    def send(self, layer: int) -> None:
        turn = layer % _BUFFERS
        self._arrived[turn].copy_(self._collected[turn], non_blocking=True)

    def send_blocks(self, chosen: Chosen) -> None:
        """Whole blocks, straight from where they lie, a copy each."""
        for out, slot in zip(self._whole, chosen.slots, strict=True):
            out.copy_(self.host.payloads[int(slot)], non_blocking=True)

    def place(
        self,
        layer: int,
        sides: torch.Tensor,
        chosen: Chosen,
        implementation: Implementation = "triton",
    ) -> None:
        """One layer's pages. `sides`: [2, blocks, BLOCK_TOKENS, kv_heads, head_dim]."""
        keys, values = (side.flatten(0, 1) for side in sides)
        scatter_rotated(
            self.keys[layer], self._rows, keys, chosen.rotation, implementation=implementation
        )
        self.values[layer].index_copy_(0, self._rows, values)

    def place_arrived(self, layer: int, chosen: Chosen) -> None:
        self.place(layer, self._arrived[layer % _BUFFERS], chosen)

    def place_whole(self, layer: int, chosen: Chosen) -> None:
        self.place(layer, self._whole[:, :, layer].transpose(0, 1), chosen)

    def fill_by_layers(self, chosen: Chosen) -> None:
        """Layer by layer through two buffers: one is filled while the other is on its way."""
        for layer in range(self.model.layers):
            self._lane.wait_until_sent(layer)
            self.collect(chosen, layer)
            with self._lane.sending(layer):
                self.send(layer)
            self._lane.wait_until_arrived(layer)
            self.place_arrived(layer, chosen)
            self._lane.note_placed(layer)

    def fill_by_blocks(self, chosen: Chosen) -> None:
        """Block by block without the CPU touching a byte; then all layers."""
        self.send_blocks(chosen)
        for layer in range(self.model.layers):
            self.place_whole(layer, chosen)

    def expected_layer(self, layer: int, chosen: Chosen) -> torch.Tensor:
        """[2, tokens, kv_heads, head_dim]: what the pages hold afterwards, by the reference."""
        source = self.host.payloads[chosen.slots, :, layer].to(self._rows.device)
        keys, values = (source[:, side].flatten(0, 1) for side in range(2))
        out = torch.zeros_like(self.keys[layer])
        scatter_rotated(out, self._rows, keys, chosen.rotation, implementation="reference")
        return torch.stack((out, values))


class _CopyLane:
    """Order between the CPU, a stream of copies and the stream of kernels; layers take turns with
    the buffers. On the CPU everything is in order already."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            self._stream = torch.cuda.Stream(device)
            self._sent = [torch.cuda.Event() for _ in range(_BUFFERS)]
            self._placed = [torch.cuda.Event() for _ in range(_BUFFERS)]

    def wait_until_sent(self, layer: int) -> None:
        """Blocks the CPU until the buffer in host memory may be overwritten."""
        if self._on_gpu:
            self._sent[layer % _BUFFERS].synchronize()

    @contextmanager
    def sending(self, layer: int) -> Generator[None]:
        """Copies begun inside run beside kernels, once the buffer on the device is free."""
        if not self._on_gpu:
            yield
            return
        self._stream.wait_event(self._placed[layer % _BUFFERS])
        with torch.cuda.stream(self._stream):
            yield
            self._sent[layer % _BUFFERS].record(self._stream)

    def wait_until_arrived(self, layer: int) -> None:
        """Later kernels wait for the copy."""
        if self._on_gpu:
            torch.cuda.current_stream().wait_event(self._sent[layer % _BUFFERS])

    def note_placed(self, layer: int) -> None:
        if self._on_gpu:
            self._placed[layer % _BUFFERS].record()
