"""A data plane over a small pool of random bits, with the real kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256

import torch

from kvws.blocks.key import BLOCK_TOKENS, page_hashes
from kvws.blocks.page import PageSource
from kvws.engine.data_plane import DataPlane, StepOutcome
from kvws.kernels.rotary import RotaryTable
from kvws.recall.profile import Profile
from kvws.recall.signals.build import KeyGeometry, enabled_signals
from kvws.recall.signals.enabled import EnabledSignals

LAYERS, KV_HEADS, QUERY_HEADS, DIM = 3, 2, 4, 8
DEVICE_PAGES = 24
HOST_BLOCKS = 12


def rotary_table(base: float) -> RotaryTable:
    frequency = base ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    angle = torch.arange(2048, dtype=torch.float64).unsqueeze(1) * frequency
    return RotaryTable(angle.cos().float(), angle.sin().float(), interleaved=False)


def rotated(
    keys: torch.Tensor, table: RotaryTable, source: torch.Tensor, target: torch.Tensor | None
) -> torch.Tensor:
    """[tokens, heads, dim] in fp64: each pair as a complex number, times z(target) / z(source)."""
    z = torch.complex(table.cos.double(), table.sin.double())
    half = DIM // 2
    turn = (z[target] if target is not None else 1) / z[source]
    pairs = torch.complex(keys[..., :half].double(), keys[..., half:].double())
    turned = pairs * turn.unsqueeze(1)
    return torch.cat([turned.real, turned.imag], dim=-1)


def signals_of(tables: list[RotaryTable], *names: str) -> EnabledSignals:
    """Signals over the rig's keys, with two content heads on two layers."""
    profile = Profile(
        model="rig",
        layers=LAYERS,
        query_heads=QUERY_HEADS,
        kv_heads=KV_HEADS,
        head_dim=DIM,
        content_heads=((1, 0), (2, 3)),
        rotated_layers=(0, 1),
        content_keys="int8",
    )
    return enabled_signals(names, KeyGeometry(LAYERS, KV_HEADS, DIM), tables, profile)


@dataclass
class Pool:
    """Per layer K and V [slots, kv_heads, head_dim], random."""

    k_buffer: list[torch.Tensor]
    v_buffer: list[torch.Tensor]

    @classmethod
    def random(cls, dtype: torch.dtype) -> Pool:
        shape = (DEVICE_PAGES * BLOCK_TOKENS, KV_HEADS, DIM)
        return cls(
            [torch.randn(shape).to(dtype) for _ in range(LAYERS)],
            [torch.randn(shape).to(dtype) for _ in range(LAYERS)],
        )

    def page(self, number: int) -> torch.Tensor:
        """[2, layers, 32, kv_heads, head_dim], a copy."""
        rows = slice(number * BLOCK_TOKENS, (number + 1) * BLOCK_TOKENS)
        return torch.stack(
            [torch.stack([b[rows] for b in side]) for side in (self.k_buffer, self.v_buffer)]
        )


@dataclass
class Rig:
    """A plane, its pool, and the calls an engine would make."""

    pool: Pool
    tables: list[RotaryTable]
    plane: DataPlane
    steps: int = 0
    layers_done: list[int] = field(default_factory=list[int])

    def write(
        self, first_block: int, pages: list[int], *, at: int = 0, workspace: str = "w"
    ) -> list[str]:
        """One step that computes device pages `pages` at page index `at` … as new blocks."""
        hashes = [
            sha256(f"{workspace} {first_block + i} at {at + i}".encode()).hexdigest()
            for i in range(len(pages))
        ]
        step = self.open(workspace)
        self.plane.stage_out(step, hashes, pages)
        self.close(step, [(h, first_block + i, at + i) for i, h in enumerate(hashes)])
        return hashes

    def open(self, workspace: str = "w") -> str:
        self.steps += 1
        step = f"step {self.steps}"
        self.plane.open_step(step, workspace)
        return step

    def close(self, step: str, named: list[tuple[str, int, int]]) -> StepOutcome:
        outcome = self.plane.close_step(step, named)
        self.plane.check_integrity()
        return outcome

    def fill_host_with_staged_pages(self, count: int) -> str:
        """A step whose pages take `count` host slots for as long as it is open."""
        step = self.open("other")
        hashes = [f"staged {i} of {step}" for i in range(count)]
        assert not self.plane.stage_out(step, hashes, list(range(count)))
        return step

    def promise(self, step: str, sources: list[PageSource]) -> list[str]:
        """Promise a view; its page names."""
        view = self.names(len(sources), step)
        assert self.plane.promise(step, list(zip(view, sources, strict=True))) == []
        return view

    def names(self, pages: int, namespace: str) -> list[str]:
        return page_hashes(range(BLOCK_TOKENS * pages), namespace)

    def load(self, step: str, hashes: list[str], pages: list[int]) -> None:
        """Fill device pages with promised pages."""
        load = self.plane.queue_load(step, hashes, pages)
        assert load is not None
        self.plane.fill([load], self.layers_done.append)
        self.plane.release_load(load)
        self.plane.check_integrity()
