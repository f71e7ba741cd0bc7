"""The tap: the query vectors of chosen requests, caught where attention receives them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvws.kernels.rerope import rotate, rotation_between
from kvws.kernels.rotary import RotaryTable


@dataclass
class _Tapped:
    """Rows caught so far of one request.

    Attributes:
        first_position: rows before it belong to the view and are not wanted.
        chunks: per layer, (positions [n], rotated Q [n, query_heads, head_dim]) of each forward.
    """

    first_position: int
    chunks: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = field(
        default_factory=dict[int, list[tuple[torch.Tensor, torch.Tensor]]]
    )


class QueryTap:
    """Collects Q by request id. Written by the scheduler thread, read by the control socket."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: dict[str, _Tapped] = {}

    def watch(self, rid: str, first_position: int) -> None:
        """Start catching the Q rows of request `rid` from `first_position` on."""
        with self._lock:
            self._requests[rid] = _Tapped(first_position)

    def release(self, step: str) -> None:
        """Forget the rows of every request of a step; request ids are "<step>.<attempt>"."""
        with self._lock:
            for rid in [rid for rid in self._requests if rid.rpartition(".")[0] == step]:
                del self._requests[rid]

    @property
    def watched(self) -> int:
        return len(self._requests)

    def catch(self, q: torch.Tensor, layer: Any, batch: Any) -> None:
        """Copy the wanted rows of one layer's forward.

        Args:
            q: [tokens of the batch, query_heads × head_dim], rotated.
            layer: SGLang's RadixAttention.
            batch: SGLang's ForwardBatch; prefill only, decode rows are no query.
        """
        if not self._requests or not batch.forward_mode.is_extend():
            return
        begin = 0
        for rid, length in zip(batch.rids or (), batch.extend_seq_lens_cpu, strict=True):
            rows = slice(begin, begin + int(length))
            begin += int(length)
            tapped = self._requests.get(rid)
            if tapped is None:
                continue
            positions = batch.positions[rows]
            wanted = positions >= tapped.first_position
            if not bool(wanted.any()):
                continue
            heads = q[rows].view(int(length), layer.tp_q_head_num, layer.qk_head_dim)
            caught = (positions[wanted].cpu(), heads[wanted].cpu())
            with self._lock:
                tapped.chunks.setdefault(layer.layer_id, []).append(caught)

    def raw_queries(self, rid: str, rotary: Sequence[RotaryTable]) -> torch.Tensor | None:
        """Un-rotated Q [layers, tokens, query_heads, head_dim] float32 of a request.

        Returns None when a layer delivered nothing: the tap did not fire.
        """
        with self._lock:
            tapped = self._requests.get(rid)
            if tapped is None or len(tapped.chunks) != len(rotary):
                return None
            layers = [tapped.chunks[layer] for layer in range(len(rotary))]
        positions = torch.cat([positions for positions, _ in layers[0]])
        back = {id(table): rotation_between(table, positions, None) for table in rotary}
        raw: list[torch.Tensor] = []
        for table, chunks in zip(rotary, layers, strict=True):
            rotated = torch.cat([q for _, q in chunks])
            raw.append(rotate(rotated, back[id(table)], out_dtype=torch.float32))
        return torch.stack(raw)
