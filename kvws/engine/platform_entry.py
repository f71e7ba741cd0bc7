# pyright: basic
"""Entry point of the SGLang platform plugin: decides, before anything heavy is imported, whether
the stock engine should run on a plain CPU."""

from __future__ import annotations

import importlib.util
import sys

import torch

_declared_ops: list[torch.library.Library] = []
"""Keeps the op declarations alive: a Library undeclares its ops when it is collected."""


def activate() -> str | None:
    """The platform class's dotted path where torch has no accelerator, else None."""
    if torch.accelerator.is_available():
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        declare_torchvision_ops()
    return "kvws.engine.platform_cpu.CpuPlatform"


def declare_torchvision_ops() -> None:
    """Declare the two torchvision ops whose absence breaks `import torchvision`.

    The package index's torchvision links CUDA, so beside a CPU torch its native library does not
    load and the import fails where it registers meta kernels for `nms` and `qnms`.
    """
    installed = importlib.util.find_spec("torchvision") is not None
    if not installed or "torchvision" in sys.modules or hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "DEF")
    for op in ("nms", "qnms"):
        library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared_ops.append(library)
