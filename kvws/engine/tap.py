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
        positions: one [n] int64 tensor a forward.
        queries: per layer, one rotated Q [n, query_heads, head_dim] a forward. They stay on the
            engine's device: the forward pass would wait for every copy to host memory.
    """

    first_position: int
    positions: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    queries: dict[int, list[torch.Tensor]] = field(
        default_factory=dict[int, list[torch.Tensor]]
    )


class QueryTap:
    """Collects Q by request id. Written by the scheduler thread, read by the control socket."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: dict[str, _Tapped] = {}
        self._batch: Any = None  # the forward whose wanted rows are known
        self._wanted: list[tuple[_Tapped, torch.Tensor]] = []

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
        if batch is not self._batch:
            self._begin(batch)
        for tapped, rows in self._wanted:
            heads = q.index_select(0, rows).view(-1, layer.tp_q_head_num, layer.qk_head_dim)
            with self._lock:
                tapped.queries.setdefault(layer.layer_id, []).append(heads)

    def _begin(self, batch: Any) -> None:
        """Find the wanted rows of a forward, once for all its layers."""
        self._batch, self._wanted = batch, []
        begin = 0
        for rid, length in zip(batch.rids or (), batch.extend_seq_lens_cpu, strict=True):
            rows = torch.arange(begin, begin + int(length), device=batch.positions.device)
            begin += int(length)
            tapped = self._requests.get(rid)
            if tapped is None:
                continue
            positions = batch.positions[rows]
            wanted = positions >= tapped.first_position
            if bool(wanted.any()):
                self._wanted.append((tapped, rows[wanted]))
                with self._lock:
                    tapped.positions.append(positions[wanted])

    def raw_queries(self, rid: str, rotary: Sequence[RotaryTable]) -> torch.Tensor | None:
        """Un-rotated Q [layers, tokens, query_heads, head_dim] float32 of a request, on the
        engine's device.

        Args:
            rotary: the table of each layer, on that device.

        Returns None when a layer delivered nothing: the tap did not fire.
        """
        with self._lock:
            tapped = self._requests.get(rid)
            if tapped is None or len(tapped.queries) != len(rotary):
                return None
            caught_positions = list(tapped.positions)
            caught = [list(tapped.queries[layer]) for layer in range(len(rotary))]
        # Copied outside the lock, for which the forward pass waits.
        positions = torch.cat(caught_positions)
        rotated = [torch.cat(rows) for rows in caught]
        raw = [torch.empty(0)] * len(rotary)
        for table in {id(table): table for table in rotary}.values():
            # One rotation for all layers that share a table: they are many, and each is small.
            sharing = [layer for layer, other in enumerate(rotary) if other is table]
            back = rotation_between(table, positions.repeat(len(sharing)), None)
            together = torch.cat([rotated[layer] for layer in sharing])
            unrotated = rotate(together, back, out_dtype=torch.float32)
            for layer, queries in zip(sharing, unrotated.chunk(len(sharing)), strict=True):
                raw[layer] = queries
        return torch.stack(raw)
