"""Which implementation of an operation runs: asked once, answered in one place."""

from __future__ import annotations

import importlib.util
import os
from typing import Literal, get_args

import torch

from kvws.errors import ConfigError

Implementation = Literal["auto", "reference", "triton"]
Resolved = Literal["reference", "triton"]


def resolve(implementation: Implementation, tensor: torch.Tensor) -> Resolved:
    """The implementation that serves `tensor`'s device.

    "auto" is triton for CUDA tensors and the reference for all others. An implementation that
    was asked for by name runs or raises: it never gives way to another one.

    Raises:
        ConfigError: the name is unknown, or Triton cannot run on this device.
    """
    check_name(implementation, get_args(Implementation))
    if implementation == "auto":
        implementation = "triton" if tensor.device.type == "cuda" else "reference"
    if implementation == "triton":
        _require_triton(tensor.device)
    return implementation


def check_name(implementation: str, known: tuple[str, ...]) -> None:
    """Raises ConfigError unless the name is one of the operation's implementations."""
    if implementation not in known:
        raise ConfigError(
            f"unknown implementation: expected one of {', '.join(known)}, got {implementation!r}"
        )


def _require_triton(device: torch.device) -> None:
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "the triton implementation needs the triton package, which is not installed",
            hint='install triton or ask for implementation="reference"',
        )
    if device.type == "cuda":
        return
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return
    raise ConfigError(
        f"the triton implementation needs CUDA tensors, got {device.type} tensors",
        hint='ask for "auto" or "reference"; tests set TRITON_INTERPRET=1 before triton is '
        "imported",
    )


def check_same_device(**tensors: torch.Tensor) -> None:
    """Raises ValueError unless all tensors share the first one's device."""
    (first, leader), *others = tensors.items()
    for name, tensor in others:
        if tensor.device != leader.device:
            raise ValueError(
                f"{name} must be on {first}'s device: "
                f"expected {leader.device}, got {tensor.device}"
            )


def check_dtype(name: str, tensor: torch.Tensor, supported: tuple[torch.dtype, ...]) -> None:
    """Raises ConfigError unless the tensor has one of the supported dtypes."""
    if tensor.dtype not in supported:
        raise ConfigError(
            f"{name} has an unsupported dtype: expected one of "
            f"{', '.join(str(dtype) for dtype in supported)}, got {tensor.dtype}"
        )


PAYLOAD_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What a KV pool may hold. fp8 pools carry scales, which these kernels do not know."""
