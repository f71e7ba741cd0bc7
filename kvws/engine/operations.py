"""The operations that the control plane can ask of a rank, by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from kvws.blocks.key import BLOCK_TOKENS
from kvws.blocks.page import Slice
from kvws.engine.data_plane import DataPlane
from kvws.engine.fingerprint import rotary_digest
from kvws.engine.tap import QueryTap
from kvws.errors import ControlError
from kvws.kernels.rotary import RotaryTable


class Operations:
    """Maps control messages to the data plane and the tap. Tensors travel as raw bytes."""

    def __init__(
        self,
        plane: DataPlane,
        tap: QueryTap,
        rotary: Sequence[RotaryTable],
        allocator: Any,
        *,
        rank: int,
        weights: str,
    ) -> None:
        """
        Args:
            allocator: SGLang's page allocator, asked only for its counts.
            weights: digest of the loaded weights.
        """
        self._plane = plane
        self._tap = tap
        self._rotary = rotary
        self._allocator = allocator
        self._rank = rank
        self._weights = weights
        self._operations: dict[str, Callable[..., Any]] = {
            "describe": self._describe,
            "open_step": plane.open_step,
            "promise": self._promise,
            "watch": tap.watch,
            "score": self._score,
            "close_step": self._close_step,
            "forget": plane.forget,
            "attach": plane.attach,
            "unsaved_blocks": plane.unsaved_blocks,
            "backlogged": plane.backlogged,
            "look_ahead": plane.look_ahead,
            "drop_workspace": plane.drop_workspace,
            "index_row": self._index_row,
            "block_payload": self._block_payload,
            "queries": self._queries,
            "stats": self._stats,
            "check_integrity": plane.check_integrity,
        }

    def handle(self, operation: str, arguments: dict[str, Any]) -> Any:
        """Run one operation.

        Raises:
            ControlError: there is no such operation.
        """
        function = self._operations.get(operation)
        if function is None:
            raise ControlError(f"unknown control operation {operation!r}")
        return function(**arguments)

    def _describe(self) -> dict[str, Any]:
        shape = self._plane.host.geometry
        return {
            "rank": self._rank,
            "weights": self._weights,
            "rotary": rotary_digest(self._rotary),
            "pid": os.getpid(),
            "layers": shape.layers,
            "kv_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "dtype": str(shape.dtype).removeprefix("torch."),
            "block_bytes": shape.block_bytes,
            "host_format": self._plane.host.format,
            "disk": self._plane.disk_description,
            "host_capacity_blocks": self._plane.host.capacity_blocks,
            "device_capacity_tokens": self._allocator.size,
        }

    def _promise(self, step: str, view: list[list[Any]]) -> list[int]:
        pages = [(page_hash, tuple(Slice(*s) for s in source)) for page_hash, source in view]
        return self._plane.promise(step, pages)

    def _score(self, rid: str, workspace: str, candidates: bytes) -> dict[str, Any]:
        """`candidates`: one byte per block, non-zero where the block competes."""
        queries = self._tap.raw_queries(rid, self._rotary)
        if queries is None:
            return {"rows": 0, "heads": 0, "scores": b""}
        mask = torch.frombuffer(bytearray(candidates), dtype=torch.uint8).bool()
        scores = self._plane.score(workspace, queries, mask)
        layers, rows, heads, _ = queries.shape
        return {"rows": rows, "heads": layers * heads, "scores": scores.numpy().tobytes()}

    def _close_step(self, step: str, named: list[tuple[str, int, int]]) -> dict[str, Any]:
        self._tap.release(step)
        return asdict(self._plane.close_step(step, named))

    def _queries(self, rid: str) -> dict[str, Any] | None:
        queries = self._tap.raw_queries(rid, self._rotary)
        return None if queries is None else _as_message(queries)

    def _index_row(self, workspace: str, number: int) -> dict[str, Any] | None:
        row = self._plane.index_row(workspace, number)
        return None if row is None else _as_message(row.contiguous())

    def _block_payload(self, workspace: str, number: int) -> dict[str, Any] | None:
        found = self._plane.block_payload(workspace, number)
        if found is None:
            return None
        payload, first_position = found
        return {**_as_message(payload.float()), "first_position": first_position}

    def _device_used_bytes(self) -> int:
        """KV bytes of pool slots that are not free: running requests and the prefix tree."""
        used_tokens = self._allocator.size - self._allocator.available_size()
        return used_tokens * self._plane.host.geometry.block_bytes // BLOCK_TOKENS

    def _stats(self) -> dict[str, int]:
        return {
            **self._plane.stats(),
            "device_used_bytes": self._device_used_bytes(),
            "watched_requests": self._tap.watched,
        }


def _as_message(tensor: torch.Tensor) -> dict[str, Any]:
    """float32 values and shape."""
    return {"shape": list(tensor.shape), "float32": tensor.numpy().tobytes()}
