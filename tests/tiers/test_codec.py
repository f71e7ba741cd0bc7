"""Payloads at rest: exact ones bit for bit, quantised ones raw, layer by layer and bounded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvws.errors import ConfigError
from kvws.kernels.rerope import rotate, rotation_between
from kvws.kernels.rotary import RotaryTable
from kvws.store.storage import SECTOR_BYTES
from kvws.tiers.codec import PayloadCodec, make_codec
from kvws.tiers.formats import PAYLOAD_FORMATS
from kvws.tiers.geometry import PayloadGeometry

QUANTISED = ("fp8", "int8", "int4")
SMALL = PayloadGeometry(layers=5, kv_heads=2, head_dim=16, dtype=torch.float32)
SMOLLM2 = PayloadGeometry(layers=30, kv_heads=3, head_dim=64, dtype=torch.float32)
LONG = 512
POISON = 0xA5

every_format = pytest.mark.parametrize("format", PAYLOAD_FORMATS)
quantised = pytest.mark.parametrize("format", QUANTISED)


def table(dim: int, base: float = 100.0) -> RotaryTable:
    frequency = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.arange(LONG, dtype=torch.float64).unsqueeze(1) * frequency
    return RotaryTable(angle.cos().float(), angle.sin().float(), interleaved=False)


def tables(geometry: PayloadGeometry) -> list[RotaryTable]:
    """Two kinds of layer, as models with local and global encodings have."""
    local, wide = table(geometry.head_dim), table(geometry.head_dim, 10000.0)
    return [local if layer == 2 else wide for layer in range(geometry.layers)]


def codec(format: str, geometry: PayloadGeometry = SMALL) -> PayloadCodec:
    return make_codec(format, geometry, tables(geometry))


def raw_payload(blocks: int, geometry: PayloadGeometry = SMALL, seed: int = 0) -> torch.Tensor:
    """K and V before rotation, fp32; channels have sizes and offsets of their own."""
    generator = torch.Generator().manual_seed(seed)
    payload = torch.randn((blocks, *geometry.shape), generator=generator)
    return payload * torch.linspace(0.1, 3, geometry.head_dim) + torch.linspace(
        -5, 5, geometry.head_dim
    )


def baked(
    raw: torch.Tensor, first_positions: torch.Tensor, geometry: PayloadGeometry = SMALL
) -> torch.Tensor:
    """The payload as a pool holds it: K of token j rotated to first_position + j."""
    payload = raw.clone()
    positions = (first_positions.unsqueeze(1) + torch.arange(32)).flatten()
    for layer, rotary in enumerate(tables(geometry)):
        keys = payload[:, 0, layer]
        keys.copy_(
            rotate(keys.flatten(0, 1), rotation_between(rotary, None, positions)).view(keys.shape)
        )
    return payload.to(geometry.dtype)


def encoded(
    codec: PayloadCodec, payload: torch.Tensor, first_positions: torch.Tensor
) -> torch.Tensor:
    data = torch.full((len(payload), codec.payload_bytes), POISON, dtype=torch.uint8)
    codec.encode(payload, first_positions, data)
    return data


def decoded(codec: PayloadCodec, data: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(like, torch.nan)
    codec.decode(data, out)
    return out


FIRST = torch.tensor([0, 32, 17, 320])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_exact_payloads_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    geometry = PayloadGeometry(5, 2, 16, dtype)
    bits = torch.randint(0, 256, (4, geometry.block_bytes), dtype=torch.uint8)  # NaN among them
    payload = bits.view(dtype).view(4, *geometry.shape)
    exact = codec("exact", geometry)
    data = encoded(exact, payload, FIRST)
    assert torch.equal(data[:, : geometry.block_bytes], bits)
    back = decoded(exact, data, payload)
    assert torch.equal(back.view(4, -1).view(torch.uint8), bits)
    assert not exact.raw_keys


@quantised
def test_quantised_keys_come_back_raw_and_close(format: str) -> None:
    raw = raw_payload(4)
    quant = codec(format)
    got = decoded(quant, encoded(quant, baked(raw, FIRST), FIRST), raw)
    spread = raw.amax(3, keepdim=True) - raw.amin(3, keepdim=True)
    keys, values = (got - raw)[:, 0].abs(), (got - raw)[:, 1].abs()
    step = {"int8": 1 / 255, "int4": 1 / 15, "fp8": None}[format]
    if step is None:
        assert (keys <= raw[:, 0].abs() / 16 + 0.02).all()
        assert (values <= raw[:, 1].abs() / 16 + 0.02).all()
    else:
        assert (keys <= spread[:, 0] * step * 0.51 + 1e-4).all()
        spread_of_tokens = raw[:, 1].amax(4, keepdim=True) - raw[:, 1].amin(4, keepdim=True)
        assert (values <= spread_of_tokens * step * 0.51 + 1e-3).all()
    assert quant.raw_keys


@quantised
def test_control_keys_of_another_position_are_not_close(format: str) -> None:
    raw = raw_payload(4)
    quant = codec(format)
    got = decoded(quant, encoded(quant, baked(raw, FIRST), FIRST + 1), raw)
    assert (got - raw)[:, 0].abs().max() > 1
    assert (got - raw)[:, 1].abs().max() < 1


@quantised
def test_the_position_leaves_no_mark(format: str) -> None:
    """The same raw keys at other positions give the same bytes, up to the rotation's rounding."""
    raw = raw_payload(1)
    quant = codec(format)
    near, far = (
        decoded(quant, encoded(quant, baked(raw, first), first), raw)
        for first in (torch.tensor([0]), torch.tensor([400]))
    )
    assert torch.equal(near[:, 1], far[:, 1])
    moved = (near - far)[:, 0].abs() > 1e-4
    assert moved.float().mean() < 0.01, "only keys at the border of two codes change"


@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_is_decoded_without_the_others(format: str, dtype: torch.dtype) -> None:
    geometry = PayloadGeometry(5, 2, 16, dtype)
    payload = baked(raw_payload(40, geometry), torch.arange(40) * 8, geometry)
    each = codec(format, geometry)
    data = encoded(each, payload, torch.arange(40) * 8)
    whole = decoded(each, data, payload)
    for layer in range(geometry.layers):
        keys, values = each.decode_layer(data, layer)
        assert keys.dtype == values.dtype == dtype
        assert torch.equal(keys, whole[:, 0, layer]) and torch.equal(values, whole[:, 1, layer])


@quantised
def test_damage_to_one_layer_stays_there(format: str) -> None:
    each = codec(format)
    data = encoded(each, baked(raw_payload(1), FIRST[:1]), FIRST[:1])
    before = [each.decode_layer(data, layer) for layer in range(SMALL.layers)]
    layer_bytes = LAYER_BYTES[format]
    data[0, layer_bytes : 2 * layer_bytes] ^= 0x11
    for layer, (keys, values) in enumerate(before):
        now = each.decode_layer(data, layer)
        same = torch.equal(now[0], keys) and torch.equal(now[1], values)
        assert same == (layer != 1)


# Codes of K and V, then scales of two bytes: 2 heads of 16 dimensions, 32 tokens.
LAYER_BYTES = {
    "fp8": 2 * 1024 + 2 * 2 * 2,
    "int8": 2 * 1024 + 2 * (2 * 32 + 2 * 64),
    "int4": 2 * 512 + 2 * (2 * 32 + 2 * 64),
}


@pytest.mark.parametrize(
    ("format", "used_bytes"),
    [
        ("exact", 1_474_560),
        ("fp8", 30 * (2 * 6144 + 2 * 3 * 2)),
        ("int8", 30 * (2 * 6144 + 2 * 2 * 192 + 2 * 2 * 96)),
        ("int4", 30 * (2 * 3072 + 2 * 2 * 192 + 2 * 2 * 192)),
    ],
)
def test_sizes_are_whole_sectors(format: str, used_bytes: int) -> None:
    payload_bytes = codec(format, SMOLLM2).payload_bytes
    assert payload_bytes % SECTOR_BYTES == 0
    assert used_bytes <= payload_bytes < used_bytes + SECTOR_BYTES


@every_format
def test_every_byte_is_written_and_padding_is_zero(format: str) -> None:
    """Nothing of what the buffer held before reaches the disk."""
    each = codec(format)
    payload = baked(raw_payload(4), FIRST)
    data = encoded(each, payload, FIRST)
    again = torch.zeros_like(data)
    each.encode(payload, FIRST, again)
    assert torch.equal(data, again)
    used = SMALL.block_bytes if format == "exact" else SMALL.layers * LAYER_BYTES[format]
    assert (data[:, used:] == 0).all()


@every_format
def test_blocks_may_lie_apart(format: str) -> None:
    each = codec(format)
    payload = baked(raw_payload(4), FIRST)
    spaced = torch.empty(4, 3, *SMALL.shape)
    spaced[:, 1] = payload
    data = torch.full((4, 2, each.payload_bytes), POISON, dtype=torch.uint8)
    each.encode(spaced[:, 1], FIRST, data[:, 1])
    assert torch.equal(data[:, 1], encoded(each, payload, FIRST))
    assert (data[:, 0] == POISON).all()
    out = torch.zeros_like(spaced)
    each.decode(data[:, 1], out[:, 2])
    assert torch.equal(out[:, 2], decoded(each, data[:, 1], payload))
    assert (out[:, :2] == 0).all()


@every_format
def test_no_blocks_is_no_work(format: str) -> None:
    each = codec(format)
    none = torch.zeros(0, *SMALL.shape)
    data = encoded(each, none, FIRST[:0])
    each.decode(data, none)
    assert each.decode_layer(data, 1)[0].shape == (0, 32, 2, 16)


def test_unknown_formats_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown payload format 'int2'") as refused:
        codec("int2")
    assert refused.value.hint == "one of exact, fp8, int8, int4"


@every_format
def test_errors_name_what_was_expected_and_what_came(format: str) -> None:
    each = codec(format)
    payload, data = raw_payload(4), torch.zeros(4, each.payload_bytes, dtype=torch.uint8)
    shape = "2, 5, 32, 2, 16"
    with pytest.raises(ValueError, match=rf"\[n, {shape}\] torch.float32, got \(4, {shape}\)"):
        each.encode(payload.half(), FIRST, data)
    with pytest.raises(ValueError, match=r"must be \(4,\) torch.int64, got \(3,\)"):
        each.encode(payload, FIRST[:3], data)
    with pytest.raises(ValueError, match=r"at rest must be \(4, \d+\) torch.uint8, got \(3, "):
        each.encode(payload, FIRST, data[:3])
    with pytest.raises(ValueError, match=r"at rest must be \(4, \d+\) torch.uint8"):
        each.decode(data[:, 1:], payload)
    with pytest.raises(ValueError, match=r"at rest must be \(4, \d+\) torch.uint8"):
        each.decode_layer(data[:, 1:], 0)


@quantised
def test_positions_outside_the_table_are_refused(format: str) -> None:
    each = codec(format)
    data = torch.zeros(1, each.payload_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match="inside the rotary table"):
        each.encode(raw_payload(1), torch.tensor([LONG - 31]), data)
    with pytest.raises(ValueError, match="expected 5 rotary tables, got 1"):
        make_codec(format, SMALL, tables(SMALL)[:1])


@quantised
def test_a_model_reads_on_almost_as_before(format: str, fidelity: dict[str, float]) -> None:
    """SmolLM2 on the shipped trace: KL divergence of the next token, in nats."""
    assert fidelity[format] < {"fp8": 1e-2, "int8": 5e-4, "int4": 3e-2}[format]
    assert fidelity["exact"] == 0
    assert fidelity["int8"] < fidelity["int4"]


@pytest.fixture(scope="module")
def fidelity(smollm2: object) -> dict[str, float]:
    """Mean KL by format. In a process of its own: the model stays out of this one's memory."""
    program = (
        "from pathlib import Path\n"
        "from kvws.bench.quantisation import measure_quantisation\n"
        "costs = measure_quantisation(Path('traces/step-summary.traj.json'),"
        " context_tokens=256, continued_tokens=32)\n"
        "for cost in costs: print('cost', cost.format, cost.mean_kl)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    lines = [line.split() for line in run.stdout.splitlines() if line.startswith("cost ")]
    return {format: float(kl) for _, format, kl in lines}
