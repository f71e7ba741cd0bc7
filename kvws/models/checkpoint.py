"""A Hugging Face model folder as a value, and how it becomes files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]


@dataclass(frozen=True)
class Checkpoint:
    """A model folder's contents.

    Attributes:
        tensors: weights by their names in transformers.
        documents: JSON values by file name, config.json among them.
        texts: other text files by name.
    """

    tensors: Mapping[str, torch.Tensor]
    documents: Mapping[str, Any]
    texts: Mapping[str, str]

    def write(self, folder: Path) -> None:
        """Write all files into the existing `folder`. Raises OSError as the disk does."""
        for name, text in self.texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        for name, value in self.documents.items():
            text = json.dumps(value, indent=1, ensure_ascii=False)
            (folder / name).write_text(text + "\n", encoding="utf-8")
        save_file(dict(self.tensors), str(folder / "model.safetensors"), {"format": "pt"})
