"""Which implementation runs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvws.errors import ConfigError
from kvws.kernels.dispatch import resolve
from kvws.kernels.mean_k import mean_raw_k, mean_rotated, raw_rotation
from kvws.kernels.rerope import rotate, rotation_between, scatter_rotated
from kvws.kernels.rotary import RotaryTable
from kvws.kernels.score import mean_k_scores

TABLE = RotaryTable(cos=torch.ones(8, 2), sin=torch.zeros(8, 2), interleaved=False)
TWO = torch.arange(2)
KEYS = torch.zeros(2, 1, 4)
ROTATION = rotation_between(TABLE, TWO, TWO)
BLOCKS = torch.zeros(2, 1, 1, 4)
OPERATIONS: dict[str, Callable[[Any], object]] = {
    "rotate": lambda name: rotate(KEYS, ROTATION, implementation=name),
    "scatter_rotated": lambda name: scatter_rotated(
        torch.zeros(2, 1, 4), TWO, KEYS, ROTATION, implementation=name
    ),
    "mean_raw_k": lambda name: mean_raw_k(BLOCKS, TWO, TABLE, implementation=name),
    "mean_rotated": lambda name: mean_rotated(
        BLOCKS, raw_rotation(TWO, 1, TABLE), implementation=name
    ),
    "mean_k_scores": lambda name: mean_k_scores(
        torch.zeros(1, 1, 1, 4),
        [torch.zeros(1, 1, 2, 4)],
        [torch.ones(2, dtype=torch.bool)],
        implementation=name,
    ),
}


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.parametrize("name", OPERATIONS)
def test_cpu_tensors_go_to_the_reference(name: str) -> None:
    OPERATIONS[name]("auto")
    OPERATIONS[name]("reference")


@pytest.mark.parametrize("name", OPERATIONS)
def test_triton_by_name_never_falls_back(name: str) -> None:
    with pytest.raises(ConfigError, match="needs CUDA tensors, got cpu tensors"):
        OPERATIONS[name]("triton")


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="expected one of auto, reference, triton, got 'cuda'"):
        OPERATIONS[name]("cuda")


@pytest.mark.parametrize("implementation", ["triton", "auto"])
def test_a_missing_triton_says_so(implementation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class OnCuda:
        device = torch.device("cuda")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    tensor: Any = OnCuda()
    with pytest.raises(ConfigError, match="triton package, which is not installed"):
        resolve(implementation, tensor)
    assert resolve("reference", tensor) == "reference"


def test_the_reference_needs_no_triton() -> None:
    """In a fresh Python without triton every operation is imported and serves the CPU."""
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import kvws.kernels.rerope, kvws.kernels.mean_k, kvws.kernels.score\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
