"""The mean of un-rotated keys, against complex numbers in fp64 and plain loops."""

from __future__ import annotations

import pytest
import torch

from kvws.errors import ConfigError
from kvws.kernels.mean_k import mean_raw_k, mean_rotated, raw_rotation
from kvws.kernels.rotary import RotaryTable, Rotation

SEEDS = (0, 1, 2)
MAX_POSITION = 256


def table(rotary_dim: int, *, interleaved: bool = False, factor: float = 1.0) -> RotaryTable:
    frequency = 10000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angle = torch.arange(MAX_POSITION, dtype=torch.float64).unsqueeze(1) * frequency
    return RotaryTable(
        cos=(factor * angle.cos()).float(),
        sin=(factor * angle.sin()).float(),
        interleaved=interleaved,
    )


TABLES = {
    "neox": table(16),
    "interleaved": table(16, interleaved=True),
    "partial": table(8),
    "partial interleaved": table(8, interleaved=True),
    "attention factor": table(16, factor=1.37),
}


def oracle(k: torch.Tensor, first: torch.Tensor, rotary: RotaryTable) -> torch.Tensor:
    """Divide each pair by its position's complex number, then average."""
    blocks, tokens, heads, _ = k.shape
    half = rotary.rotary_dim // 2
    result = k.double().mean(dim=1)
    for block in range(blocks):
        for head in range(heads):
            for pair in range(half):
                a, b = (2 * pair, 2 * pair + 1) if rotary.interleaved else (pair, pair + half)
                total = 0j
                for token in range(tokens):
                    row = int(first[block]) + token
                    z = complex(float(rotary.cos[row, pair]), float(rotary.sin[row, pair]))
                    key = k[block, token, head]
                    total += complex(float(key[a]), float(key[b])) / z
                result[block, head, a] = total.real / tokens
                result[block, head, b] = total.imag / tokens
    return result


def problem(seed: int, tokens: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(3, tokens, 2, 16, generator=generator)
    return k, torch.randint(0, MAX_POSITION - tokens, (3,), generator=generator)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("tokens", [1, 8])
def test_the_mean_is_of_raw_keys(name: str, tokens: int, seed: int) -> None:
    k, first = problem(seed, tokens)
    got = mean_raw_k(k, first, TABLES[name])
    error = float((got.double() - oracle(k, first, TABLES[name])).abs().max())
    assert got.dtype == torch.float32
    assert error < 2e-6, f"seed {seed}"


@pytest.mark.parametrize("seed", SEEDS)
def test_control_the_oracle_catches_a_rotation_the_wrong_way(seed: int) -> None:
    k, first = problem(seed)
    good = raw_rotation(first, 8, TABLES["neox"])
    planted = Rotation(cos=good.cos, sin=-good.sin, interleaved=False, identity=False)
    error = float((mean_rotated(k, planted) - oracle(k, first, TABLES["neox"])).abs().max())
    assert error > 0.1, f"seed {seed}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_keys_lose_nothing_more(dtype: torch.dtype) -> None:
    """The sum is of the stored values exactly, in fp32: rounding is the payload's alone."""
    k, first = problem(0)
    got = mean_raw_k(k.to(dtype), first, TABLES["neox"])
    assert torch.equal(got, mean_raw_k(k.to(dtype).float(), first, TABLES["neox"]))


def test_one_rotation_serves_every_layer() -> None:
    k, first = problem(0)
    rotation = raw_rotation(first, 8, TABLES["partial"])
    for layer in (k, 2 * k):
        assert torch.equal(
            mean_rotated(layer, rotation), mean_raw_k(layer, first, TABLES["partial"])
        )


def test_strided_keys_and_blocks_beyond_the_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn(11, 8, 4, 32, generator=generator)
    k, first = wide[:, :, 1:3, 8:24], torch.arange(11) * 8
    whole = mean_raw_k(k.contiguous(), first, TABLES["neox"])
    monkeypatch.setattr("kvws.kernels.mean_k.reference.SCRATCH_BYTES", 1)
    torch.testing.assert_close(mean_raw_k(k, first, TABLES["neox"]), whole, rtol=0, atol=1e-6)


def test_no_blocks_is_no_work() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert mean_raw_k(torch.zeros(0, 8, 2, 16), none, TABLES["neox"]).shape == (0, 2, 16)


def test_errors_name_what_was_expected_and_what_came() -> None:
    k, first = problem(0)
    with pytest.raises(ValueError, match=r"at least one token a block, got \(3, 0, 2, 16\)"):
        mean_raw_k(k[:, :0], first, TABLES["neox"])
    with pytest.raises(ValueError, match=r"expected \(3,\) torch.int64, got \(2,\) torch.int64"):
        mean_raw_k(k, first[:2], TABLES["neox"])
    with pytest.raises(ValueError, match="expected at most 8, got 16"):
        mean_raw_k(k[..., :8], first, TABLES["neox"])
    with pytest.raises(ValueError, match="expected 0 to 255, got 250 to 257"):
        mean_raw_k(k[:1], torch.tensor([250]), TABLES["neox"])
    with pytest.raises(ValueError, match="one row per token: expected 24, got 16"):
        mean_rotated(k, raw_rotation(first[:2], 8, TABLES["neox"]))
    with pytest.raises(ConfigError, match=r"unsupported dtype.*got torch.float64"):
        mean_raw_k(k.double(), first, TABLES["neox"])
