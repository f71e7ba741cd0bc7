"""What the kernels need to know of a model's rotary position encoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

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

    def on(self, device: torch.device) -> RotaryTable:
        """The table on a device: itself if it is there."""
        if self.cos.device == device:
            return self
        return RotaryTable(self.cos.to(device), self.sin.to(device), self.interleaved)


@dataclass(frozen=True)
class Rotation:
    """One rotation per token: (a, b) becomes (a·cos - b·sin, b·cos + a·sin) in each pair.

    Attributes:
        cos: [n, rotary_dim / 2] float32.
        sin: [n, rotary_dim / 2] float32.
        interleaved: the pairing, as in `RotaryTable`.
        identity: every token stays as it is (cos is 1 and sin is 0), so bits can be copied.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool
    identity: bool

    def __post_init__(self) -> None:
        if self.cos.shape != self.sin.shape or self.cos.dim() != 2:
            raise ValueError(
                f"cos and sin must both be [n, rotary_dim / 2], "
                f"got {tuple(self.cos.shape)} and {tuple(self.sin.shape)}"
            )
        if self.cos.dtype != torch.float32 or self.sin.dtype != torch.float32:
            raise ValueError(
                f"cos and sin must be float32, got {self.cos.dtype} and {self.sin.dtype}"
            )

    @property
    def tokens(self) -> int:
        return self.cos.shape[0]

    @property
    def rotary_dim(self) -> int:
        return 2 * self.cos.shape[1]

    @cached_property
    def wide_cos(self) -> torch.Tensor:
        """[n, rotary_dim] float32: the cosine of each dimension, in the order of the pairing."""
        return self._widened(self.cos)

    @cached_property
    def wide_sin(self) -> torch.Tensor:
        """[n, rotary_dim] float32: the sine of each dimension, in the order of the pairing."""
        return self._widened(self.sin)

    def _widened(self, table: torch.Tensor) -> torch.Tensor:
        if self.interleaved:
            return table.repeat_interleave(2, dim=1)
        return table.repeat(1, 2)

    @cached_property
    def moved(self) -> torch.Tensor:
        """[m] int64: the tokens that do change, ascending."""
        return (~self._still).nonzero().flatten()

    @cached_property
    def unmoved(self) -> torch.Tensor:
        """[n - m] int64: the tokens that keep their bits, ascending."""
        return self._still.nonzero().flatten()

    @cached_property
    def _still(self) -> torch.Tensor:
        return ((self.cos == 1) & (self.sin == 0)).all(dim=1)


def tables_on(tables: Sequence[RotaryTable], device: torch.device) -> list[RotaryTable]:
    """Tables on a device; those that were one table still are."""
    moved = {id(table): table.on(device) for table in {id(t): t for t in tables}.values()}
    return [moved[id(table)] for table in tables]


def pairs(
    x: torch.Tensor, rotary_dim: int, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """First and second members of the rotated pairs: views [..., rotary_dim / 2] of x."""
    if interleaved:
        return x[..., 0:rotary_dim:2], x[..., 1:rotary_dim:2]
    return x[..., : rotary_dim // 2], x[..., rotary_dim // 2 : rotary_dim]


def rotation_between(
    rotary: RotaryTable,
    source_positions: torch.Tensor | None,
    target_positions: torch.Tensor | None,
) -> Rotation:
    """The one rotation that takes tokens baked at `source_positions` to `target_positions`.

    With z = cos + i·sin of the table it is z(target) / z(source) = z(target)·z̄(source) / |z|²:
    the norm is divided out once, which a table with |z| ≠ 1 (an attention factor, or rounding
    through bf16) needs. Equal positions give exactly 1 and 0, so those tokens keep their bits.

    Args:
        rotary: the engine's table.
        source_positions: [n] int64 on the table's device, or None for tokens not yet rotated.
        target_positions: [n] int64 on the table's device, or None to take the rotation out.

    Raises:
        ValueError: both are None, shapes or dtypes differ, or a position is outside the table.
    """
    if source_positions is None and target_positions is None:
        raise ValueError("source_positions and target_positions cannot both be None")
    if source_positions is None:
        cos, sin = _rows(rotary, "target_positions", target_positions)
    elif target_positions is None:
        source_cos, source_sin = _rows(rotary, "source_positions", source_positions)
        norm = source_cos.square() + source_sin.square()
        cos, sin = source_cos / norm, -source_sin / norm
    else:
        if source_positions.shape != target_positions.shape:
            raise ValueError(
                f"target_positions must have the shape of source_positions: expected "
                f"{tuple(source_positions.shape)}, got {tuple(target_positions.shape)}"
            )
        source_cos, source_sin = _rows(rotary, "source_positions", source_positions)
        target_cos, target_sin = _rows(rotary, "target_positions", target_positions)
        norm = source_cos.square() + source_sin.square()
        still = (source_positions == target_positions).unsqueeze(1)
        cos = (target_cos * source_cos + target_sin * source_sin) / norm
        sin = (target_sin * source_cos - target_cos * source_sin) / norm
        cos = cos.masked_fill(still, 1.0)
        sin = sin.masked_fill(still, 0.0)
    identity = bool(((cos == 1) & (sin == 0)).all())
    return Rotation(cos=cos, sin=sin, interleaved=rotary.interleaved, identity=identity)


def _rows(
    rotary: RotaryTable, name: str, positions: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The table's rows at `positions`: two [n, rotary_dim / 2] tensors."""
    assert positions is not None
    if positions.dim() != 1 or positions.dtype != torch.int64:
        raise ValueError(
            f"{name} must be [n] int64, got {tuple(positions.shape)} {positions.dtype}"
        )
    if positions.device != rotary.cos.device:
        raise ValueError(
            f"{name} must be on the table's device: "
            f"expected {rotary.cos.device}, got {positions.device}"
        )
    if positions.numel():
        low, high = (int(bound) for bound in torch.aminmax(positions))
        if low < 0 or high >= rotary.max_position:
            raise ValueError(
                f"{name} must lie inside the rotary table: expected 0 to "
                f"{rotary.max_position - 1}, got {low} to {high}"
            )
    return rotary.cos.index_select(0, positions), rotary.sin.index_select(0, positions)
