# pyright: basic
"""SGLang's external cache linker, bound to the data plane of this rank.

Nothing here may raise into the scheduler loop: a failure becomes a refusal or a failed load, is
logged, and counted.
"""

from __future__ import annotations

import logging
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (
    LayerWiseLoadCounter,
    UnifiedCacheLinker,
)

from kvws.blocks.key import BLOCK_TOKENS
from kvws.engine import plugin
from kvws.engine.control_server import ControlServer
from kvws.engine.data_plane import DataPlane, QueuedLoad
from kvws.engine.operations import Operations
from kvws.engine.scoring_device import KeysOfRank, open_scoring_device
from kvws.engine.startup_report import report_startup_error
from kvws.engine.threads import leave_cores_to_the_forward_pass
from kvws.engine.tiers import TierSettings, open_disk, open_host, open_signals
from kvws.errors import KvwsError, LoadFailed, UnsupportedModel
from kvws.kernels.place import prepare as prepare_placing
from kvws.kernels.rotary import tables_on
from kvws.tiers.geometry import PayloadGeometry
from kvws.tiers.pool_stream import Mark, PoolStream

logger = logging.getLogger(__name__)


class WorkspaceLinker(UnifiedCacheLinker):
    """Serves promised view pages from lower tiers and stages computed pages out to them.

    `extra_config`: {"control_dir": str, "tiers": TierSettings as a dict, "signals": list of their
    names, "profile": text of the model's retrieval profile, or "", "index_bytes": int or None}.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        config = extra_config or {}
        control_dir = Path(config["control_dir"])
        rank = _tensor_parallel_rank(params)
        try:
            allocator = params.token_to_kv_pool_allocator
            pool = allocator.get_kvcache()
            _require_supported_pool(pool, params.page_size, plugin.rotary)
            keys = pool.k_buffer[0]
            geometry = PayloadGeometry(
                layers=pool.layer_num,
                kv_heads=keys.shape[1],
                head_dim=keys.shape[2],
                dtype=keys.dtype,
            )
            tiers = TierSettings(**config["tiers"])
            host = open_host(
                tiers,
                geometry,
                plugin.rotary,
                context_tokens=server_args.context_length,
                running_requests=server_args.max_running_requests,
            )
            prepare_placing()
            ranks = server_args.tp_size
            signals = open_signals(
                config["signals"],
                config["profile"],
                geometry,
                plugin.rotary,
                rank=rank,
                ranks=ranks,
            )
            disk = open_disk(tiers, host, plugin.rotary, signals, rank=rank, ranks=ranks)
            scoring = open_scoring_device(
                signals,
                keys.device,
                config["index_bytes"],
                KeysOfRank(geometry, plugin.query_heads[0], server_args.context_length),
            )
        except KvwsError as error:
            report_startup_error(control_dir, error)
            raise
        self.forward_stream = forward_stream
        self.pools = {PoolName.KV: pool}
        self.layer_done_counter = self._layers = LayerWiseLoadCounter(pool.layer_num)
        rotary = tables_on(plugin.rotary, keys.device)
        self._plane = DataPlane(
            pool,
            rotary,
            host,
            signals,
            disk,
            scoring.rows,
            on_thread_start=leave_cores_to_the_forward_pass,
        )
        self._stream = PoolStream(keys.device)
        self._queued: dict[str, QueuedLoad | None] = {}
        self._finished_offloads: deque[bool] = deque()
        self._loader = ThreadPoolExecutor(
            1, thread_name_prefix="kvws-stage-in", initializer=leave_cores_to_the_forward_pass
        )
        self._control = ControlServer(
            control_dir / f"rank-{rank}.sock",
            Operations(
                self._plane,
                plugin.tap,
                rotary,
                allocator,
                scoring,
                rank=rank,
                weights=plugin.weights[0],
            ),
        )
        self._control.start()

    # ---- stage-out ---------------------------------------------------------------------------

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Refusing (False) leaves the pages "not stored": they are offered at the next insert."""
        try:
            transfer = transfers[0]
            assert transfer.device_indices is not None
            if self._stream.queues:  # a forward may still be writing the pages of its chunk
                for written in self.record_offload_ready():
                    written.wait()
            pages = (transfer.device_indices[::BLOCK_TOKENS] // BLOCK_TOKENS).tolist()
            stored = self._plane.stage_out(session_id, list(transfer.keys or ()), pages)
        except Exception:
            logger.exception("kvws: stage-out failed; the pages are refused")
            return False
        if stored:
            self._finished_offloads.append(True)
        return stored

    def num_completed_offloads(self) -> int:
        return len(self._finished_offloads)

    def pop_completed_offload(self) -> bool:
        return self._finished_offloads.popleft()

    # ---- stage-in ----------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """Grants exactly the pages that open steps promised; runs on every scheduling pass."""
        try:
            granted = self._plane.granted_pages(list(transfers[0].keys or ()))
        except Exception:
            logger.exception("kvws: lookup failed; nothing is granted")
            return []
        return list(range(1, granted + 1))

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Always accepts: a refused load would be recomputed as text under the view's hashes.

        A load whose bytes are gone is queued as None and fails when its batch starts.
        """
        transfer = transfers[0]
        try:
            assert transfer.device_indices is not None
            pages: list[int] = (transfer.device_indices[::BLOCK_TOKENS] // BLOCK_TOKENS).tolist()
            step = rid.rpartition(".")[0]
            self._queued[rid] = self._plane.queue_load(step, list(transfer.keys or ()), pages)
        except Exception:
            logger.exception("kvws: load of %s could not be queued; it will fail", rid)
            self._queued[rid] = None
        return True

    def start_layer_wise_loading(self) -> int:
        if not self._queued:
            return -1
        loads, self._queued = list(self._queued.values()), {}
        index = self._layers.update_producer()
        self._loader.submit(self._fill, index, loads, self._stream.mark())
        return index

    def _fill(self, index: int, loads: list[QueuedLoad | None], mark: Mark | None) -> None:
        """`mark`: what was queued before it may still use the pages that are filled."""
        ready = [load for load in loads if load is not None]
        failed = False
        try:
            if len(ready) < len(loads):
                raise LoadFailed("a promised page lost its bytes before it was loaded")
            with self._stream.behind([mark]):
                self._plane.fill(ready, lambda layer: self._complete(index, layer))
        except Exception as error:
            failed = True
            logger.exception("kvws: stage-in failed; its requests are aborted")
            self._layers.fail(index, error)
        finally:
            for load in ready:
                self._plane.release_load(load, failed=failed)

    def _complete(self, index: int, layer: int) -> None:
        """The forward pass goes on with a layer as soon as it is told, on a stream of its own."""
        self._stream.finish()
        self._layers.complete(index, layer)

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self._layers.finish(counter_index)

    def cancel_queued_load(self, rid: str) -> bool:
        if rid not in self._queued:
            return False
        load = self._queued.pop(rid)
        if load is not None:
            self._plane.release_load(load)
        return True

    # ---- lifecycle ---------------------------------------------------------------------------

    def reset(self) -> None:
        """The device cache was flushed: drop what is in flight, keep the workspaces."""
        for rid in list(self._queued):
            self.cancel_queued_load(rid)
        self._finished_offloads.clear()
        self._layers.reset()

    def close(self) -> None:
        self._control.stop()
        self._loader.shutdown(wait=True)
        self._plane.close()


def _tensor_parallel_rank(params: Any) -> int:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0
    group = params.attn_tp_cache_group or params.tp_cache_group
    return torch.distributed.get_rank(group=group)


def _require_supported_pool(pool: Any, page_size: int, rotary: list[Any]) -> None:
    """Refuse pools that the data plane cannot read as plain K and V pages."""
    if page_size != BLOCK_TOKENS:
        raise UnsupportedModel(
            f"the engine's page size is {page_size}", hint=f"start it with {BLOCK_TOKENS}"
        )
    if not hasattr(pool, "k_buffer") or not hasattr(pool, "v_buffer"):
        raise UnsupportedModel(
            f"the engine's KV pool is a {type(pool).__name__}",
            hint="kvws reads plain K and V pools; MLA, hybrid and sliding-window pools come later",
        )
    if pool.k_buffer[0].dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise UnsupportedModel(
            f"the engine's KV pool holds {pool.k_buffer[0].dtype}",
            hint="start the engine without a quantised KV cache",
        )
    if len(rotary) != pool.layer_num:
        raise UnsupportedModel(
            f"rotary tables were found for {len(rotary)} of {pool.layer_num} layers",
            hint="the kvws plugin did not run in this engine process; check SGLANG_PLUGINS",
        )
