"""The packaged model, converted: it is the model that it claims to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvws.engine.platform_entry import declare_torchvision_ops
from kvws.models import RopeParameters, load_config, read_model_config, require_relocatable

declare_torchvision_ops()  # a torchvision that links CUDA breaks transformers beside a CPU torch


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(smollm2))


def test_geometry(smollm2: Path) -> None:
    geometry = read_model_config(smollm2)
    require_relocatable(load_config(smollm2))
    assert (geometry.layers, geometry.query_heads, geometry.kv_heads) == (30, 9, 3)
    assert (geometry.head_dim, geometry.max_position, geometry.vocab) == (64, 8192, 49152)
    assert geometry.rope == RopeParameters(1e5, "default", 64)


def test_it_knows_the_capital_of_france(smollm2: Path, tokenizer: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(str(smollm2))
    assert model.dtype == torch.float32
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    with torch.inference_mode():
        answer = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(answer[0]).startswith("The capital of France is Paris")


def test_the_chat_template_is_the_models_own(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_digits_are_single_tokens(tokenizer: Any) -> None:
    assert tokenizer.tokenize("x=2048") == ["x", "=", "2", "0", "4", "8"]


# The model's vocabulary has no token for these control characters, nor for planes without
# assigned characters: they vanish.
WITHOUT_TOKEN = frozenset("\x04\x06\x13\x14\x16\x1d")


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=("Cs", "Cn"), exclude_characters=WITHOUT_TOKEN)))
def test_text_survives_a_round_trip(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
