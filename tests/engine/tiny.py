"""A tiny random model: for tests that are about the loop, not about the answers."""

from __future__ import annotations

from pathlib import Path

from tests.engine.families import make_model


def tiny_model(tokenizer_folder: Path, folder: Path) -> Path:
    """Three layers, 64 wide: a step takes a few milliseconds."""
    make_model("llama3-rope-scaling", tokenizer_folder, folder)
    return folder
