"""The conversion of a GGUF file is exact and touches no disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from kvws.errors import ModelError
from kvws.models.gguf_checkpoint import convert_gguf


def ignore_progress(done: int, total: int) -> None:
    pass


@pytest.fixture
def gguf_file(tiny_llama: Any, tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    tiny_llama.write(path, seed=7)
    return path


def test_weights_come_back_as_transformers_orders_them(tiny_llama: Any, gguf_file: Path) -> None:
    tensors = convert_gguf(gguf_file, ignore_progress).tensors
    expected = tiny_llama.weights(seed=7)
    assert set(tensors) == set(expected)
    for name, values in expected.items():
        assert np.array_equal(tensors[name].numpy(), values), name


def test_config_says_what_the_file_says(tiny_llama: Any, gguf_file: Path) -> None:
    config = convert_gguf(gguf_file, ignore_progress).documents["config.json"]
    assert config["num_attention_heads"] == tiny_llama.HEADS
    assert config["num_key_value_heads"] == tiny_llama.KV_HEADS
    assert config["head_dim"] == tiny_llama.HEAD_DIM
    assert config["max_position_embeddings"] == tiny_llama.CONTEXT
    assert config["rope_theta"] == 5000.0
    assert config["rms_norm_eps"] == 1e-5
    assert config["vocab_size"] == len(tiny_llama.WORDS)
    assert config["tie_word_embeddings"] is True


def test_tokenizer_and_chat_template_come_along(tiny_llama: Any, gguf_file: Path) -> None:
    checkpoint = convert_gguf(gguf_file, ignore_progress)
    assert checkpoint.documents["tokenizer_config.json"]["chat_template"] == tiny_llama.TEMPLATE
    tokenizer = Tokenizer.from_str(checkpoint.texts["tokenizer.json"])
    assert tokenizer.encode("<|im_start|>ab ba").tokens == ["<|im_start|>", "ab", "Ġ", "b", "a"]


def test_progress_counts_to_the_end(tiny_llama: Any, gguf_file: Path) -> None:
    seen: list[tuple[int, int]] = []
    convert_gguf(gguf_file, lambda done, total: seen.append((done, total)))
    total = len(tiny_llama.weights(0))
    assert seen == [(n, total) for n in range(1, total + 1)]


def test_nothing_is_written(gguf_file: Path) -> None:
    convert_gguf(gguf_file, ignore_progress)
    assert list(gguf_file.parent.iterdir()) == [gguf_file]


def test_written_documents_are_json(gguf_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    convert_gguf(gguf_file, ignore_progress).write(folder)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
    assert (folder / "model.safetensors").stat().st_size > 0


def test_another_architecture_is_refused(tiny_llama: Any, tmp_path: Path) -> None:
    tiny_llama.write(tmp_path / "other.gguf", architecture="mamba")
    with pytest.raises(ModelError, match="mamba"):
        convert_gguf(tmp_path / "other.gguf", ignore_progress)


@pytest.mark.parametrize("keep_bytes", [0, 3, 100, 2000])
def test_a_truncated_file_is_refused(gguf_file: Path, keep_bytes: int) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes()[:keep_bytes])
    with pytest.raises(ModelError):
        convert_gguf(gguf_file, ignore_progress)
