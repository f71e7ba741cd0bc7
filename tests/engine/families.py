"""Tiny random models of several families, and the checks that each must pass.

Run as `python -m tests.engine.families FAMILY TOKENIZER_FOLDER WORK_FOLDER`; prints one JSON line.
An engine has one model, so every family gets a process of its own.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from kvws.blocks.page import whole_block
from kvws.engine.launch import RunningEngine, running_engine
from kvws.engine.settings import EngineSettings
from kvws.limits import Limits
from kvws.session.workspace import Workspace
from tests.engine.asking import ask_plainly, ask_view, ask_workspace, watched_ids
from tests.engine.oracle import Oracle, rows_of_blocks

_SIZES: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,  # large enough that attention depends on content and position
    "tie_word_embeddings": False,
}


def _config(family: str) -> Any:
    import transformers

    match family:
        case "qwen2-qkv-bias":
            return transformers.Qwen2Config(**_SIZES)
        case "qwen3-qk-norm":
            return transformers.Qwen3Config(**_SIZES, head_dim=32)
        case "llama3-rope-scaling":
            scaling = {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            }
            return transformers.LlamaConfig(**_SIZES, rope_parameters=scaling)
        case "stablelm-partial-rotary":
            rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
            return transformers.StableLmConfig(
                **_SIZES, rope_parameters=rope, partial_rotary_factor=0.25
            )
        case "glm4-interleaved-partial-rotary":
            rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
            return transformers.Glm4Config(
                **_SIZES, head_dim=16, rope_parameters=rope, pad_token_id=0, eos_token_id=0
            )
    raise ValueError(family)


FAMILIES = (
    "qwen2-qkv-bias",
    "qwen3-qk-norm",
    "llama3-rope-scaling",
    "stablelm-partial-rotary",
    "glm4-interleaved-partial-rotary",
)


def make_model(family: str, tokenizer_folder: Path, folder: Path) -> None:
    """A random model with the embedded model's tokenizer. The seed is fixed."""
    import transformers

    from tests.engine import oracle  # noqa: F401 (declares the ops that transformers misses)

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(_config(family), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    for file in tokenizer_folder.glob("tokenizer*"):
        shutil.copy(file, folder)


def measure(family: str, folder: Path) -> dict[str, Any]:
    """Differences to the stock engine and to transformers; all should be tiny but the control."""
    settings = EngineSettings(
        model=folder, context_tokens=1024, device_tokens=2048, host_bytes=64 << 20
    )
    with running_engine(settings) as running:
        return _measure(running, Oracle(str(folder)))


def _measure(running: RunningEngine, oracle: Oracle) -> dict[str, Any]:
    engine = running.engine
    limits = Limits(512, 512, 32, 128, 128)
    watched = watched_ids(_SIZES["vocab_size"])
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1000, 40000, (300,), generator=generator).tolist()
    history, query = tokens[:256], tokens[256:]
    workspace = Workspace("family")
    plain = running.run(ask_plainly(engine, tokens, 4, watched))
    running.run(ask_workspace(engine, workspace, history[:100], limits))
    first = running.run(
        ask_workspace(engine, workspace, tokens, limits, count=4, watched=watched)
    )
    running.run(engine.flush_device_cache())
    restored = running.run(
        ask_workspace(engine, workspace, tokens, limits, count=4, watched=watched)
    )
    assert restored.report is not None
    _, reference = oracle.greedy(None, rows_of_blocks([0]), tokens, 1)
    raw = oracle.history(history)
    view = [0, 2, 3, 6]
    sparse = running.run(
        ask_view(engine, workspace, [whole_block(b) for b in view], query, 4, watched)
    )
    expected, logprobs = oracle.greedy(raw, rows_of_blocks(view), query, 4)
    _, misplaced = oracle.greedy(raw, rows_of_blocks([0, 3, 2, 6]), query, 4)
    return {
        "same_tokens": plain.tokens == first.tokens == restored.tokens,
        "stock": float((plain.logprobs[0] - reference[0, ::8]).abs().max()),
        "workspace": first.off_by(plain),
        "restored": restored.off_by(plain),
        "restored_pages": restored.report.loaded_pages,
        "sparse_same_tokens": sparse.tokens == expected,
        "sparse": float((sparse.logprobs - logprobs[:, ::8]).abs().max()),
        "control": float((sparse.logprobs[0] - misplaced[0, ::8]).abs().max()),
    }


if __name__ == "__main__":
    chosen, tokenizer, work = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    make_model(chosen, tokenizer, work)
    print(json.dumps(measure(chosen, work)))
