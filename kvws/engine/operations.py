"""The operations that the control plane can ask of a rank, by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from kvws.blocks.key import BLOCK_TOKENS
from kvws.blocks.page import Slice
from kvws.engine.data_plane import DataPlane
from kvws.engine.fingerprint import rotary_digest
from kvws.engine.scoring_device import ScoringDevice
from kvws.engine.tap import QueryTap
from kvws.engine.threads import give_way_to_the_forward_pass
from kvws.errors import ControlError
from kvws.kernels.mean_k import mean_rotated
from kvws.kernels.rotary import RotaryTable, tables_on
from kvws.recall.signals.signal import BlockKeys


class Operations:
    """Maps control messages to the data plane and the tap. Tensors travel as raw bytes."""

    def __init__(
        self,
        plane: DataPlane,
        tap: QueryTap,
        rotary: Sequence[RotaryTable],
        allocator: Any,
        scoring: ScoringDevice,
        *,
        rank: int,
        weights: str,
    ) -> None:
        """
        Args:
            rotary: the table of each layer, on the engine's device.
            allocator: SGLang's page allocator, asked only for its counts.
            scoring: where the plane scores.
            weights: digest of the loaded weights.
        """
        self._plane = plane
        self._tap = tap
        self._rotary = rotary
        self._host_rotary = tables_on(rotary, torch.device("cpu"))
        self._allocator = allocator
        self._scoring = scoring
        self._rank = rank
        self._weights = weights
        self._operations: dict[str, Callable[..., Any]] = {
            "describe": self._describe,
            "open_step": plane.open_step,
            "promise": self._promise,
            "watch": tap.watch,
            "score": self._score,
            "score_runs": self._score_runs,
            "close_step": self._close_step,
            "forget": plane.forget,
            "attach": plane.attach,
            "unsaved_blocks": plane.unsaved_blocks,
            "backlogged": plane.backlogged,
            "look_ahead": plane.look_ahead,
            "drop_workspace": plane.drop_workspace,
            "mean_keys": self._mean_keys,
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
            "scoring": self._scoring.description,
            "scored_at_once_blocks": self._scored_at_once_blocks,
        }

    @property
    def _scored_at_once_blocks(self) -> int | None:
        rows = self._scoring.rows
        return rows.capacity_blocks if rows is not None else None

    def _promise(self, step: str, view: list[list[Any]]) -> list[int]:
        pages = [(page_hash, tuple(Slice(*s) for s in source)) for page_hash, source in view]
        return self._plane.promise(step, pages)

    def _score(
        self,
        rid: str,
        workspace: str,
        candidates: bytes,
        first_positions: bytes,
        query_first: int,
        content_rows: bytes = b"",
    ) -> dict[str, Any]:
        """Scores of a watched request's queries.

        Args:
            candidates: one byte per block, non-zero where the block competes.
            first_positions: little-endian int32 per block: of its first token in its line.
            query_first: position of the query's first token in the line that it continues.
            content_rows: one byte per query row, non-zero where it counts for content; empty
                for all.
        """
        queries = self._tap.raw_queries(rid, self._rotary)
        if queries is None:
            return {"rows": 0, "heads": 0, "scores": {}}
        give_way_to_the_forward_pass()
        layers, rows, heads, _ = queries.shape
        counts = _counting(content_rows, rows)
        scores = self._plane.scored_index(workspace).score(
            queries,
            torch.tensor(np.frombuffer(first_positions, dtype="<i4"), dtype=torch.int64),
            query_first,
            _mask(candidates),
            counts,
        )
        return {
            "rows": rows,
            "heads": layers * heads,
            "scores": {name: of_blocks.numpy().tobytes() for name, of_blocks in scores.items()},
        }

    def _score_runs(self, rid: str, workspace: str, content_rows: bytes = b"") -> bytes | None:
        """Scores of runs of blocks, float32; None without queries or without content heads.

        Args:
            content_rows: as for `_score`.
        """
        queries = self._tap.raw_queries(rid, self._rotary)
        if queries is None:
            return None
        give_way_to_the_forward_pass()
        counts = _counting(content_rows, queries.shape[1])
        scores = self._plane.scored_index(workspace).score_runs(queries, counts)
        return None if scores is None else scores.numpy().tobytes()

    def _close_step(self, step: str, named: list[tuple[str, int, int]]) -> dict[str, Any]:
        self._tap.release(step)
        return asdict(self._plane.close_step(step, named))

    def _queries(self, rid: str) -> dict[str, Any] | None:
        queries = self._tap.raw_queries(rid, self._rotary)
        return None if queries is None else _as_message(queries)

    def _mean_keys(self, workspace: str, number: int) -> dict[str, Any] | None:
        """Mean of a block's un-rotated keys, [layers, kv_heads, head_dim]."""
        found = self._plane.block_payload(workspace, number)
        if found is None:
            return None
        payload, first_position = found
        keys = BlockKeys(
            lambda layer: payload[0, layer].unsqueeze(0),
            torch.tensor([first_position]),
            self._host_rotary,
        )
        means = [
            mean_rotated(keys.of_layer(layer), keys.to_raw(layer))[0]
            for layer in range(len(self._rotary))
        ]
        return _as_message(torch.stack(means))

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


def _mask(values: bytes) -> torch.Tensor:
    """[values] bool: which are not zero."""
    return torch.tensor(np.frombuffer(values, dtype=np.uint8) != 0)


def _counting(content_rows: bytes, rows: int) -> torch.Tensor | None:
    """[rows] bool: which rows count for content; None for all.

    Rows that were not computed are the first: the caller asks again when some are missing.

    Raises:
        ControlError: there are more rows than it was said of which count.
    """
    if not content_rows:
        return None
    if len(content_rows) < rows:
        raise ControlError(f"{len(content_rows)} content rows were named, but {rows} were tapped")
    return _mask(content_rows)[len(content_rows) - rows :]


def _as_message(tensor: torch.Tensor) -> dict[str, Any]:
    """float32 values and shape."""
    return {"shape": list(tensor.shape), "float32": tensor.cpu().numpy().tobytes()}
