"""Rotary tables as models have them, made from their published formulas."""

from __future__ import annotations

import math

import torch

from kvws.kernels.rotary import RotaryTable


def plain_frequencies(rotary_dim: int, base: float) -> torch.Tensor:
    """base^(-2i/d) of RoPE (Su et al., 2021), [rotary_dim / 2] float64."""
    return base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)


def llama3_frequencies(
    rotary_dim: int,
    base: float,
    *,
    factor: float = 8.0,
    low_factor: float = 1.0,
    high_factor: float = 4.0,
    trained_positions: int = 8192,
) -> torch.Tensor:
    """Llama 3.1's: long waves slowed down by `factor`, short ones kept, a ramp between."""
    frequencies = plain_frequencies(rotary_dim, base)
    turns = trained_positions * frequencies / (2 * math.pi)
    kept = ((turns - low_factor) / (high_factor - low_factor)).clamp(0.0, 1.0)
    return frequencies * (kept + (1 - kept) / factor)


def yarn_frequencies(
    rotary_dim: int,
    base: float,
    *,
    factor: float = 4.0,
    trained_positions: int = 32768,
    fast_turns: float = 32.0,
    slow_turns: float = 1.0,
) -> torch.Tensor:
    """YaRN's (Peng et al., 2023, section 3.2): as above, with the ramp over dimensions."""

    def dimension(turns: float) -> float:
        """Where a wave makes so many turns over the trained positions."""
        wave = math.log(trained_positions / (2 * math.pi * turns))
        return rotary_dim * wave / (2 * math.log(base))

    first = max(0, math.floor(dimension(fast_turns)))
    last = min(rotary_dim - 1, math.ceil(dimension(slow_turns)))
    pair = torch.arange(rotary_dim // 2, dtype=torch.float64)
    slowed = ((pair - first) / max(last - first, 1e-3)).clamp(0.0, 1.0)
    return plain_frequencies(rotary_dim, base) * (1 - slowed + slowed / factor)


def yarn_magnitude(factor: float = 4.0) -> float:
    """The size of YaRN's rotations (section 3.3), which therefore are no pure rotations."""
    return 0.1 * math.log(factor) + 1.0


def rotary_table(
    frequencies: torch.Tensor,
    positions: int,
    device: torch.device,
    *,
    interleaved: bool = False,
    magnitude: float = 1.0,
) -> RotaryTable:
    """The table of positions 0 … positions - 1."""
    angles = torch.arange(positions, dtype=torch.float64).unsqueeze(1) * frequencies
    return RotaryTable(
        cos=(magnitude * angles.cos()).float().to(device),
        sin=(magnitude * angles.sin()).float().to(device),
        interleaved=interleaved,
    )


POSITIONS = 4096
"""Of the tables that kernels are checked with."""


def checked_tables(head_dim: int, device: torch.device) -> dict[str, RotaryTable]:
    """Every kind of table that a kernel must know how to handle, by name."""
    partial = head_dim * 3 // 4
    full = plain_frequencies(head_dim, 1e6)
    some = plain_frequencies(partial, 1e4)
    llama = llama3_frequencies(head_dim, 5e5)
    yarn = yarn_frequencies(head_dim, 1e6)
    return {
        "NeoX": rotary_table(full, POSITIONS, device),
        "interleaved": rotary_table(full, POSITIONS, device, interleaved=True),
        "partial": rotary_table(some, POSITIONS, device),
        "partial interleaved": rotary_table(some, POSITIONS, device, interleaved=True),
        "Llama-3": rotary_table(llama, POSITIONS, device),
        "YaRN": rotary_table(yarn, POSITIONS, device, magnitude=yarn_magnitude()),
    }


TABLE_NAMES = ("NeoX", "interleaved", "partial", "partial interleaved", "Llama-3", "YaRN")
