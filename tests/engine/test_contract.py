"""What kvws relies on in SGLang 0.5.23. An upgrade fails here, in a second, by name."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import inspect
from typing import Any

import pytest

from kvws.engine import platform_entry

platform_entry.declare_torchvision_ops()

from kvws.engine.client import FAILED_LOAD_MESSAGE  # noqa: E402


def resolve(path: str) -> Any:
    """The object behind a dotted path."""
    module, _, rest = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in rest.split("."):
        found = getattr(found, name)
    return found


def parameters(path: str) -> list[str]:
    return list(inspect.signature(resolve(path)).parameters)


def test_the_pinned_version_is_installed() -> None:
    assert importlib.metadata.version("sglang") == "0.5.23"


def test_the_tap_receives_query_layer_and_batch() -> None:
    path = "sglang.srt.layers.attention.base_attn_backend:AttentionBackend.forward"
    assert parameters(path)[:6] == ["self", "q", "k", "v", "layer", "forward_batch"]


def test_backends_that_hand_on_by_name_reach_the_tap() -> None:
    """The hybrid backend, of a GPU whose prefill and decode attention differ, does."""
    path = "sglang.srt.layers.attention.base_attn_backend:AttentionBackend.forward"
    ours = parameters("kvws.engine.plugin:_catch_queries")
    assert ours[1:7] == parameters(path)[:6]


def test_a_linker_on_a_gpu_is_told_what_to_wait_for() -> None:
    path = "sglang.srt.mem_cache.unified_cache.unified_cache_linker:UnifiedCacheLinker"
    assert parameters(f"{path}.record_offload_ready") == ["self"]
    assert resolve(path).forward_stream is None


@pytest.mark.parametrize(
    "field", ["rids", "extend_seq_lens_cpu", "positions", "forward_mode"]
)
def test_a_batch_says_whose_rows_are_whose(field: str) -> None:
    batch = resolve("sglang.srt.model_executor.forward_batch_info:ForwardBatch")
    assert field in {f.name for f in dataclasses.fields(batch)}


def test_models_are_hooked_after_loading() -> None:
    assert parameters("sglang.srt.model_executor.model_runner:ModelRunner.load_model")[0] == "self"


def test_the_linker_interface_has_the_methods_that_kvws_implements() -> None:
    path = "sglang.srt.mem_cache.unified_cache.unified_cache_linker:UnifiedCacheLinker"
    assert resolve(path).__abstractmethods__ == {
        "lookup", "load", "start_layer_wise_loading", "finish_layer_wise_loading",
        "cancel_queued_load", "offload", "num_completed_offloads", "pop_completed_offload",
        "reset", "close",
    }  # fmt: skip
    assert parameters(f"{path}.offload") == ["self", "transfers", "session_id"]
    assert parameters(f"{path}.lookup") == ["self", "rid", "transfers"]
    assert parameters(f"{path}.load") == ["self", "rid", "transfers"]


def test_a_transfer_names_pages_and_device_slots() -> None:
    transfer = resolve("sglang.srt.mem_cache.hicache_storage:PoolTransfer")
    assert {"name", "keys", "device_indices"} <= {f.name for f in dataclasses.fields(transfer)}


def test_the_cpu_attention_replaces_one_method_of_the_stock_backend() -> None:
    path = "sglang.srt.layers.attention.torch_native_backend:TorchNativeAttnBackend"
    ours = "kvws.engine.attention_cpu:NewRowsAttention"
    method = "_run_sdpa_forward_extend"
    assert parameters(f"{path}.{method}") == parameters(f"{ours}.{method}")


def test_a_failed_load_is_known_by_its_message() -> None:
    path = "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache"
    source = inspect.getsource(resolve(f"{path}.finish_external_linker_loads"))
    assert f'"{FAILED_LOAD_MESSAGE}"' in source


def test_requests_carry_namespace_session_and_logprob_start() -> None:
    request = resolve("sglang.srt.managers.io_struct:GenerateReqInput")
    names = {f.name for f in dataclasses.fields(request)}
    assert {
        "rid", "session_id", "extra_key", "input_ids", "sampling_params", "stream",
        "return_logprob", "logprob_start_len", "token_ids_logprob",
    } <= names  # fmt: skip


def test_rotary_modules_hold_one_table_and_say_how_pairs_lie() -> None:
    base = "sglang.srt.layers.rotary_embedding.base:RotaryEmbedding"
    assert {"head_size", "rotary_dim", "is_neox_style"} <= set(parameters(f"{base}.__init__"))
