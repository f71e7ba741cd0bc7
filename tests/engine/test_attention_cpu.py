"""Attention of the new rows alone is the stock backend's, without its needless rows."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest
import torch

from kvws.engine import platform_entry

platform_entry.declare_torchvision_ops()

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend  # noqa: E402

from kvws.engine import attention_cpu  # noqa: E402
from kvws.engine.attention_cpu import NewRowsAttention  # noqa: E402

HEADS, KV_HEADS, DIM = 6, 2, 16


def attend(
    backend: type[Any], sequences: list[tuple[int, int]], run_tokens: int = 1
) -> torch.Tensor:
    """Output rows of a batch.

    `sequences`: (prefix, new) of each; `run_tokens`: length of the pieces, in shuffled order, that
    their slots lie in.
    """
    generator = torch.Generator().manual_seed(0)
    totals = [prefix + new for prefix, new in sequences]
    new_rows = sum(new for _, new in sequences)
    pool = -(-2 * sum(totals) // run_tokens) * run_tokens
    runs = torch.arange(pool).view(-1, run_tokens)
    slots = runs[torch.randperm(len(runs), generator=generator)].flatten()
    req_to_token = torch.zeros(len(sequences), max(totals), dtype=torch.int64)
    for row, total in enumerate(totals):
        begin = sum(totals[:row])
        req_to_token[row, :total] = slots[begin : begin + total]
    output = torch.full((new_rows, HEADS, DIM), torch.nan)
    return object.__new__(backend)._run_sdpa_forward_extend(
        torch.randn(new_rows, HEADS, DIM, generator=generator),
        output,
        torch.randn(pool, KV_HEADS, DIM, generator=generator),
        torch.randn(pool, KV_HEADS, DIM, generator=generator),
        req_to_token,
        torch.arange(len(sequences)),
        torch.tensor(totals),
        torch.tensor([prefix for prefix, _ in sequences]),
        torch.tensor([new for _, new in sequences]),
        scaling=DIM**-0.5,
        enable_gqa=True,
        causal=True,
    )


@pytest.mark.parametrize(
    "sequences",
    [[(0, 7)], [(64, 1)], [(64, 33)], [(0, 5), (32, 3), (96, 40)]],
    ids=["no prefix", "one row", "many rows", "a batch"],
)
@pytest.mark.parametrize("run_tokens", [1, 32, 512], ids=["scattered", "in pages", "in one piece"])
@pytest.mark.parametrize("long_prefix_tokens", [1, 4096], ids=["in parts", "at once"])
def test_the_rows_equal_the_stock_backend_s(
    sequences: list[tuple[int, int]],
    run_tokens: int,
    long_prefix_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_cpu, "LONG_PREFIX_TOKENS", long_prefix_tokens)
    ours = attend(NewRowsAttention, sequences, run_tokens)
    stock = attend(TorchNativeAttnBackend, sequences, run_tokens)
    assert not ours.isnan().any()
    assert torch.allclose(ours, stock, atol=1e-6), float((ours - stock).abs().max())


def test_the_comparison_notices_a_prefix_of_another_length() -> None:
    assert not torch.allclose(
        attend(NewRowsAttention, [(64, 8)]), attend(TorchNativeAttnBackend, [(32, 40)])[:8]
    )


def test_the_engine_finds_the_platform_and_the_plugin_by_name() -> None:
    """SGLang picks both by entry point name; the launcher asks for exactly these."""
    platforms = importlib.metadata.entry_points(group="sglang.srt.platforms")
    plugins = importlib.metadata.entry_points(group="sglang.srt.plugins")
    assert platforms["kvws_cpu"].load() is platform_entry.activate
    assert plugins["kvws"].value == "kvws.engine.plugin:install"
