"""Sizes and RoPE parameters, under the names of old and new configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvws.errors import ModelError
from kvws.models import ModelGeometry, RopeParameters, read_model_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 100,
    "rope_theta": 5e5,
}


def read(folder: Path, config: object) -> ModelGeometry:
    (folder / "config.json").write_text(json.dumps(config))
    return read_model_config(folder)


def test_sizes_are_read(tmp_path: Path) -> None:
    geometry = read(tmp_path, LLAMA)
    assert geometry == ModelGeometry(
        architecture="LlamaForCausalLM",
        layers=3,
        query_heads=8,
        kv_heads=2,
        head_dim=8,
        max_position=512,
        vocab=100,
        rope=RopeParameters(theta=5e5, type="default", rotary_dim=8),
    )
    assert geometry.gqa_group == 4
    assert geometry.kv_values_per_token == 2 * 3 * 2 * 8


def test_head_dim_need_not_divide_the_width(tmp_path: Path) -> None:
    assert read(tmp_path, {**LLAMA, "head_dim": 128}).head_dim == 128


def test_without_kv_heads_each_query_head_has_its_own(tmp_path: Path) -> None:
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert read(tmp_path, config).kv_heads == 8


def test_old_and_new_rope_settings_say_the_same(tmp_path: Path) -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 128}
    old = read(tmp_path, {**LLAMA, "rope_scaling": {"type": "yarn", **scaling}})
    config = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    parameters = {"rope_theta": 5e5, "rope_type": "yarn", **scaling}
    new = read(tmp_path, {**config, "rope_parameters": parameters})
    assert old == new
    assert new.rope == RopeParameters(5e5, "yarn", 8, scaling)


def test_part_of_a_head_may_be_rotated(tmp_path: Path) -> None:
    rope = read(tmp_path, {**LLAMA, "partial_rotary_factor": 0.5}).rope
    assert rope is not None
    assert rope.rotary_dim == 4


def test_a_first_generation_llama_names_no_rope_settings(tmp_path: Path) -> None:
    config = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    assert read(tmp_path, config).rope == RopeParameters(10000.0, "default", 8)


def test_a_model_without_rope_has_none(tmp_path: Path) -> None:
    gpt2 = {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "vocab_size": 50,
    }
    geometry = read(tmp_path, gpt2)
    assert geometry.rope is None
    assert (geometry.layers, geometry.kv_heads, geometry.head_dim) == (2, 4, 16)


def test_a_nested_language_model_is_found(tmp_path: Path) -> None:
    wrapper = {"model_type": "some_vl", "text_config": LLAMA, "vision_config": {"depth": 2}}
    assert read(tmp_path, wrapper).layers == 3


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": None},
        {"num_hidden_layers": 0},
        {"vocab_size": "many"},
        {"hidden_size": True},
        {"num_key_value_heads": 3},
        {"rope_theta": "large"},
    ],
    ids=str,
)
def test_broken_sizes_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(ModelError) as caught:
        read(tmp_path, {**LLAMA, **change})
    assert caught.value.hint


@pytest.mark.parametrize("text", [None, "", "{", "[]", "\udcff", "[" * 100_000])
def test_a_broken_config_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError) as caught:
        read_model_config(tmp_path)
    assert caught.value.hint
