"""What the kernels need to know of a model's rotary position encoding."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RotaryTable:
    """The engine's own cos/sin table, so that rotations here are the engine's bit for bit.

    Attributes:
        cos: [max_position, rotary_dim / 2] float32. Scaled by the model's attention factor
            where the scaling has one (YaRN), so cos² + sin² need not be 1.
        sin: [max_position, rotary_dim / 2] float32.
        interleaved: pairs are (0, 1), (2, 3), … (GPT-J) instead of (0, r/2), (1, r/2 + 1), …
            (NeoX).
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool

    def __post_init__(self) -> None:
        if self.cos.shape != self.sin.shape or self.cos.dim() != 2:
            raise ValueError(
                f"cos and sin must be two [max_position, rotary_dim / 2] tables, "
                f"got {tuple(self.cos.shape)} and {tuple(self.sin.shape)}"
            )
        if self.cos.dtype != torch.float32 or self.sin.dtype != torch.float32:
            raise ValueError("cos and sin must be float32: rotation maths is done in fp32 always")

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of a head that are rotated; the rest pass through."""
        return 2 * self.cos.shape[1]

    @property
    def max_position(self) -> int:
        return self.cos.shape[0]
