"""Moving payloads between the tiers: bits as they are, keys rotated to their place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvws.blocks.table import RAW, Residency
from kvws.kernels.rotary import RotaryTable, Rotation, rotation_between
from kvws.tiers import stage_in
from kvws.tiers.device import paged
from kvws.tiers.geometry import PayloadGeometry
from kvws.tiers.host import HostTier
from kvws.tiers.stage_in import HeldSlice, LayerFill, PageLoad, fill_pages
from kvws.tiers.stage_out import copy_out

LAYERS, HEADS, DIM, PAGES = 3, 2, 8, 6
POISON = 12345.0


@dataclass
class Pool:
    k_buffer: list[torch.Tensor]
    v_buffer: list[torch.Tensor]


def random_pool(dtype: torch.dtype) -> Pool:
    shape = (PAGES * 32, HEADS, DIM)
    return Pool(
        [torch.randn(shape).to(dtype) for _ in range(LAYERS)],
        [torch.randn(shape).to(dtype) for _ in range(LAYERS)],
    )


def rotary_table(base: float = 100.0) -> RotaryTable:
    frequency = base ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    angle = torch.arange(1024, dtype=torch.float64).unsqueeze(1) * frequency
    return RotaryTable(angle.cos().float(), angle.sin().float(), interleaved=False)


def moved(
    keys: torch.Tensor, table: RotaryTable, source: int | None, target: int
) -> torch.Tensor:
    """[heads, dim] of one token in fp64: each pair times z(target) / z(source), if baked."""
    z = torch.complex(table.cos.double(), table.sin.double())
    pairs = torch.complex(keys[:, : DIM // 2].double(), keys[:, DIM // 2 :].double())
    turned = pairs * (z[target] if source is None else z[target] / z[source])
    return torch.cat([turned.real, turned.imag], dim=1)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(7)


@pytest.fixture(params=["placed", "sent 1", "sent 2", "sent 9"])
def whole_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ways that whole blocks go: into CPU memory, or to a GPU, so many layers at once."""
    way, _, layers = request.param.partition(" ")
    if way == "sent":
        send = stage_in._send_and_scatter

        def sent(pages: Sequence[PageLoad], host: HostTier, *rest: Any) -> LayerFill:
            block = host.exact_block(0)
            of_layers = int(layers) * len(pages) * block[:, 0].nbytes
            monkeypatch.setattr(stage_in, "SENT_BYTES", of_layers)
            return send(pages, host, *rest)

        monkeypatch.setattr(stage_in, "_place", sent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pages_are_copied_out_bit_by_bit(dtype: torch.dtype) -> None:
    pool = random_pool(dtype)
    geometry = PayloadGeometry(LAYERS, HEADS, DIM, dtype)
    host = HostTier(geometry, 8 * geometry.slot_bytes)
    copy_out(pool, [4, 1, 2], host, [6, 2, 3])
    for slot, page in ((6, 4), (2, 1), (3, 2)):
        for layer in range(LAYERS):
            assert torch.equal(host.payload(slot)[0, layer], paged(pool.k_buffer[layer])[page])
            assert torch.equal(host.payload(slot)[1, layer], paged(pool.v_buffer[layer])[page])


@pytest.mark.usefixtures("whole_blocks")
def test_slices_of_any_length_are_packed_into_pages_layer_by_layer() -> None:
    """Keys turn from their baked positions to those of the page; values keep their bits."""
    geometry = PayloadGeometry(LAYERS, HEADS, DIM, torch.float32)
    host = HostTier(geometry, 4 * geometry.slot_bytes)
    for slot in range(4):
        host.write(torch.tensor([slot]), torch.randn(1, *geometry.shape).to(geometry.dtype))
    pool = random_pool(torch.float32)
    tables = [rotary_table(), rotary_table(10.0), rotary_table()]
    blocks = {slot: Residency("", slot, first) for slot, first in ((3, 100), (0, 64), (1, 64))}
    pages = [
        PageLoad(
            9,
            (HeldSlice(blocks[3], 5, 1), HeldSlice(blocks[0], 0, 30), HeldSlice(blocks[3], 31, 1)),
            device_page=3,
        ),
        PageLoad(2, (HeldSlice(blocks[1], 0, 32),), device_page=0),
    ]
    slots = torch.cat([torch.arange(96, 128), torch.arange(0, 32)])
    untouched = torch.arange(128, PAGES * 32)
    before = [buffer[untouched].clone() for buffer in (*pool.k_buffer, *pool.v_buffer)]
    order: list[int] = []
    fill_pages(pages, host, pool, tables, order.append)

    row = 0
    for page in pages:
        position = 32 * page.view_index
        for piece in page.slices:
            for i in range(piece.length):
                source, at = host.payload(piece.block.slot)[:, :, piece.offset + i], slots[row]
                for layer, table in enumerate(tables):
                    baked = piece.block.first_position + piece.offset + i
                    expected = moved(source[0, layer], table, baked, position)
                    got = pool.k_buffer[layer][at].double()
                    torch.testing.assert_close(got, expected, atol=2e-6, rtol=0)
                    assert torch.equal(pool.v_buffer[layer][at], source[1, layer])
                row, position = row + 1, position + 1
    assert order == [0, 1, 2]
    after = [buffer[untouched] for buffer in (*pool.k_buffer, *pool.v_buffer)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.usefixtures("whole_blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_whole_blocks_and_slices_baked_and_raw_share_one_load(dtype: torch.dtype) -> None:
    """Each page is what it is alone, bit for bit, and what complex numbers say."""
    geometry = PayloadGeometry(LAYERS, HEADS, DIM, dtype)
    host = HostTier(geometry, 4 * geometry.slot_bytes)
    host.write(torch.arange(4), torch.randn(4, *geometry.shape).to(dtype))
    baked, raw = Residency("", 3, 96), Residency("", 1, RAW)
    pages = [
        PageLoad(9, (HeldSlice(baked, 0, 32),), device_page=3),
        PageLoad(4, (HeldSlice(raw, 0, 32),), device_page=0),
        PageLoad(2, (HeldSlice(raw, 30, 2), HeldSlice(baked, 1, 30)), device_page=5),
    ]
    tables = [rotary_table(), rotary_table(10.0), rotary_table()]
    together = random_pool(dtype)
    fill_pages(pages, host, together, tables, lambda _: None)
    for page in pages:
        alone = random_pool(dtype)
        fill_pages([page], host, alone, tables, lambda _: None)
        tokens = [(piece.block, piece.offset + i) for piece in page.slices
                  for i in range(piece.length)]  # fmt: skip
        for layer, table in enumerate(tables):
            keys = paged(together.k_buffer[layer])[page.device_page]
            values = paged(together.v_buffer[layer])[page.device_page]
            assert torch.equal(keys, paged(alone.k_buffer[layer])[page.device_page])
            for i, (block, offset) in enumerate(tokens):
                held = host.payload(block.slot)[:, layer, offset]
                source = None if block is raw else block.first_position + offset
                expected = moved(held[0], table, source, 32 * page.view_index + i)
                error = (keys[i].double() - expected).abs().max()
                assert error <= 4 * (torch.finfo(dtype).eps / 2 + 2**-22)
                assert torch.equal(values[i], held[1])


def test_layers_that_share_a_table_share_its_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = PayloadGeometry(LAYERS, HEADS, DIM, torch.float32)
    host = HostTier(geometry, geometry.slot_bytes)
    host.write(torch.tensor([0]), torch.randn(1, *geometry.shape))
    page = PageLoad(9, (HeldSlice(Residency("", 0, 64), 0, 32),), device_page=3)
    computed: list[RotaryTable] = []

    def counted(table: RotaryTable, *positions: torch.Tensor) -> Rotation:
        computed.append(table)
        return rotation_between(table, *positions)

    monkeypatch.setattr(stage_in, "rotation_between", counted)
    tables = [rotary_table(), rotary_table(10.0)]
    fill_pages([page], host, random_pool(torch.float32), [*tables, tables[0]], lambda _: None)
    assert len(computed) == 2


def test_no_pages_are_done_at_once() -> None:
    geometry = PayloadGeometry(LAYERS, HEADS, DIM, torch.float32)
    host = HostTier(geometry, geometry.slot_bytes)
    order: list[int] = []
    fill_pages([], host, random_pool(torch.float32), [rotary_table()] * LAYERS, order.append)
    assert order == [0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_page_back_at_its_own_place_keeps_its_bits(dtype: torch.dtype) -> None:
    geometry = PayloadGeometry(LAYERS, HEADS, DIM, dtype)
    host = HostTier(geometry, geometry.slot_bytes)
    host.write(torch.tensor([0]), torch.randn(1, *geometry.shape).to(geometry.dtype))
    pool = random_pool(dtype)
    page = PageLoad(5, (HeldSlice(Residency("", 0, 160), 0, 32),), device_page=0)
    fill_pages([page], host, pool, [rotary_table()] * LAYERS, lambda _: None)
    for layer in range(LAYERS):
        assert torch.equal(pool.k_buffer[layer][:32], host.payload(0)[0, layer])
        assert torch.equal(pool.v_buffer[layer][:32], host.payload(0)[1, layer])
