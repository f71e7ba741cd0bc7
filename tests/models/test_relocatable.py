"""Which models are served, and what the others are told."""

from __future__ import annotations

from typing import Any

import pytest

from kvws.errors import UnsupportedModel
from kvws.models import require_relocatable

Config = dict[str, Any]
LLAMA: Config = {"model_type": "llama", "rope_theta": 1e5}

SERVED: dict[str, Config] = {
    "llama": LLAMA,
    "first llama, no rope keys": {"model_type": "llama"},
    "llama 3.1": {**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    "yarn": {**LLAMA, "rope_scaling": {"type": "yarn", "factor": 4.0}},
    "linear": {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "rope_parameters": {
        "model_type": "qwen3",
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        "layer_types": ["full_attention"] * 2,
    },
    "qwen2, window switched off": {
        "model_type": "qwen2",
        "rope_theta": 1e6,
        "sliding_window": 32768,
        "use_sliding_window": False,
    },
    "mistral without window": {
        "model_type": "mistral",
        "rope_theta": 1e6,
        "sliding_window": None,
    },
}

REFUSED: dict[str, tuple[Config, str]] = {
    "gpt2": ({"model_type": "gpt2", "n_head": 12}, "no rotary"),
    "absolute": ({**LLAMA, "position_embedding_type": "absolute"}, "absolute"),
    "bloom": ({"model_type": "bloom", "alibi": True}, "ALiBi"),
    "mpt": ({"model_type": "mpt", "attn_config": {"alibi": True}}, "ALiBi"),
    "deepseek v2": ({"model_type": "deepseek_v2", "rope_theta": 1e4}, "MLA"),
    "kv_lora_rank": (
        {"model_type": "minicpm3", "rope_theta": 1e4, "kv_lora_rank": 256},
        "MLA",
    ),
    "mistral v0.1": (
        {"model_type": "mistral", "rope_theta": 1e4, "sliding_window": 4096},
        "sliding window of 4096",
    ),
    "qwen2, window on": (
        {**LLAMA, "sliding_window": 128, "use_sliding_window": True},
        "sliding window",
    ),
    "sliding layers": (
        {**LLAMA, "layer_types": ["full_attention", "sliding_attention"]},
        "sliding window",
    ),
    "nested sliding layers": (
        {"model_type": "gemma3", "text_config": {**LLAMA, "layer_types": ["sliding_attention"]}},
        "sliding window",
    ),
    "linear attention": (
        {**LLAMA, "layer_types": ["linear_attention", "full_attention"]},
        "linear_attention",
    ),
    "chunked attention": ({**LLAMA, "attention_chunk_size": 8192}, "chunks"),
    "mamba": ({"model_type": "mamba", "state_size": 16}, "recurrent"),
    "hybrid mamba": ({"model_type": "bamba", "mamba_d_state": 128}, "recurrent"),
    "jamba layers": ({**LLAMA, "layers_block_type": ["mamba", "attention"]}, "mamba"),
    "dynamic": ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
    "longrope": ({**LLAMA, "rope_scaling": {"rope_type": "longrope"}}, "longrope"),
    "mrope type": ({**LLAMA, "rope_scaling": {"type": "mrope"}}, "multimodal"),
    "mrope section": (
        {**LLAMA, "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]}},
        "multimodal",
    ),
    "some layers without rope": ({**LLAMA, "no_rope_layers": [1, 1, 1, 0]}, "layers without"),
    "nothing known": ({}, "no rotary"),
}


@pytest.mark.parametrize("config", SERVED.values(), ids=SERVED.keys())
def test_served(config: Config) -> None:
    require_relocatable(config)


@pytest.mark.parametrize(("config", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_with_reason_and_hint(config: Config, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        require_relocatable(config)
    assert caught.value.hint
    assert "\n" not in str(caught.value)
