"""The data path of a step: score the blocks, choose the best, bring them into the view's pages.

Timed part by part and as a whole. The index and the view's pages are in device memory. Payloads
are in pinned host memory, as many as fit there: what a block costs to bring in does not depend on
how many others there are. All blocks of the view are new to it, which is the worst case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from kvws.bench.gpu.case import BLOCK_TOKENS, close, equal, within_rounding
from kvws.bench.gpu.ceilings import Ceilings
from kvws.bench.gpu.clock import Clock, TooSlowError
from kvws.bench.gpu.report import Row
from kvws.bench.gpu.rotary_tables import llama3_frequencies, plain_frequencies, rotary_table
from kvws.bench.gpu.step_index import RUN_BLOCKS, DefaultIndex, MeanKIndex, Model, Workspace
from kvws.bench.gpu.step_view import Chosen, HostSlab, ViewPages

VIEW_BLOCKS = 256
HOST_SLAB_BYTES = 4 << 30

WORKSPACE_TOKENS = (262_144, 1_048_576, 4_194_304)
_CLOSELY = 8192
_TILE_BLOCKS = 16_384
_QUERY_TOKENS = 64

_OTHER_BYTES = 6 << 30
"""On the device beside an index: pages, buffers, logits, what a flush of the cache writes."""


MODELS = (
    # Layers that `default_rotated_layers` reads; heads as a calibration finds them.
    Model("like Qwen3-8B", 36, 32, 8, 128, 12, 8,
          lambda d: rotary_table(plain_frequencies(128, 1e6), 40_960, d)),
    Model("like Llama-3.1-8B", 32, 32, 8, 128, 11, 8,
          lambda d: rotary_table(llama3_frequencies(128, 5e5), 131_072, d)),
)  # fmt: skip

_SMALL_MODEL = Model(
    "small", 2, 4, 2, 32, 1, 2, lambda d: rotary_table(plain_frequencies(32, 1e4), 4096, d)
)
_SMALL_WORKSPACE = Workspace(blocks=80, closely=32, tile_blocks=48, query_tokens=3)


def workspace(tokens: int) -> Workspace:
    return Workspace(tokens // BLOCK_TOKENS, _CLOSELY, _TILE_BLOCKS, _QUERY_TOKENS)


def host_slab(model: Model) -> HostSlab:
    """As many blocks as its bytes allow."""
    block_bytes = 4 * model.layers * BLOCK_TOKENS * model.kv_heads * model.head_dim
    return HostSlab(model, HOST_SLAB_BYTES // block_bytes, pinned=True)


def check_step(device: torch.device) -> Iterator[Row]:
    """A small step, whose scores and pages must be those of the references."""
    model, space = _SMALL_MODEL, _SMALL_WORKSPACE
    host = HostSlab(model, 7, pinned=device.type == "cuda")
    step = _Step(model, space, host, 5, device)
    every = step.index.every_block()
    mean_k = MeanKIndex(model, space, device)
    for name, got, expected in (
        ("Mean-K", mean_k.scores(), mean_k.scores("reference")),
        ("runs", step.index.shortlist(), step.index.shortlist("reference")),
        ("default signals", step.index.scores(every), step.index.scores(every, "reference")),
    ):
        tolerance = equal() if got.dtype == torch.bool else close(1e-3, 1e-5)
        share = tolerance.share((got,), (expected,))
        yield Row("check", "step", f"scores, {name}", share <= 1, share)
    for name, fill in step.fills.items():
        step.pages.keys.zero_()
        step.pages.values.zero_()
        chosen = step.choose(step.closely())
        fill(chosen)
        share = max(_page_share(step.pages, layer, chosen) for layer in range(model.layers))
        yield Row("check", "step", f"the view's pages, {name}", share <= 1, share)


def _page_share(pages: ViewPages, layer: int, chosen: Chosen) -> float:
    """Of what is allowed: keys to their rounding, values not at all."""
    keys, values = pages.expected_layer(layer, chosen)
    turned = within_rounding(keys.dtype).share((pages.keys[layer],), (keys,))
    return max(turned, equal().share((pages.values[layer],), (values,)))


def why_not(model: Model, space: Workspace, device: torch.device) -> str | None:
    """What keeps a workspace from being timed on a GPU; None if nothing does. Of the two indexes
    the larger one has to fit: they are not there at the same time."""
    needed = space.blocks * max(model.mean_k_row_bytes, model.default_row_bytes) + _OTHER_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    if free >= needed:
        return None
    return f"needs {needed / 1e9:.0f} GB of device memory, {free / 1e9:.0f} are free"


def transfer_rows(
    model: Model, host: HostSlab, clock: Clock, ceilings: Ceilings
) -> Iterator[Row]:
    """From host memory to the view, whatever the size of the workspace."""
    pages = ViewPages(model, host, VIEW_BLOCKS, clock.device)
    chosen = pages.chosen(torch.arange(VIEW_BLOCKS) * 3)
    view_bytes = VIEW_BLOCKS * host.block_bytes
    layer_bytes = view_bytes // model.layers
    named = partial(Row, "step", model.name)

    up = ceilings.host_to_device
    yield _timed(named("a layer: collect, CPU"), clock.wall_ms,
                 lambda: pages.collect(chosen, 0), 2 * layer_bytes)
    yield _timed(named("a layer: to the device"), clock.device_ms,
                 lambda: pages.send(0), layer_bytes, up)
    yield _timed(named("a layer: into the pages"), clock.device_ms,
                 lambda: pages.place_arrived(0, chosen), 2 * layer_bytes, ceilings.device_copy)
    for name, fill in _fills(pages).items():
        yield _timed(named(f"the view, {name}"), clock.wall_ms,
                     partial(fill, chosen), view_bytes, up)


def step_rows(
    model: Model, space: Workspace, host: HostSlab, clock: Clock, ceilings: Ceilings
) -> Iterator[Row]:
    """Scoring in its three ways, choosing, and the whole step, of one workspace."""
    tokens = f"{space.blocks * BLOCK_TOKENS >> 10:,}K tokens"
    named = partial(Row, "step", model.name)
    mean_k_bytes = space.blocks * model.mean_k_row_bytes
    index_bytes = space.blocks * model.default_row_bytes
    yield named(f"{tokens}: where it is", note=(
        f"device: index {index_bytes / 1e9:.1f} GB (Mean-K {mean_k_bytes / 1e9:.1f}), pages of "
        f"the view; host: {host.slots} of {space.blocks:,} blocks of {host.block_bytes / 1e6:.1f} "
        f"MB"
    ))  # fmt: skip
    mean_k = MeanKIndex(model, space, clock.device)
    copy = ceilings.device_copy
    yield _timed(named(f"{tokens}: Mean-K, all blocks"), clock.device_ms, mean_k.scores,
                 mean_k_bytes, copy)
    del mean_k
    torch.cuda.empty_cache()
    step = _Step(model, space, host, VIEW_BLOCKS, clock.device)
    every = step.index.every_block()
    yield _timed(named(f"{tokens}: default, all blocks"), clock.device_ms,
                 lambda: step.index.scores(every), index_bytes, copy)
    some_bytes = min(space.closely, space.blocks) * model.default_row_bytes
    some_bytes += space.blocks // RUN_BLOCKS * 2 * model.content_heads * model.head_dim
    yield _timed(named(f"{tokens}: default, runs then {space.closely:,} blocks"),
                 clock.device_ms, step.closely, some_bytes, copy)
    scores = step.closely()
    yield _timed(named(f"{tokens}: choose"), clock.wall_ms, lambda: step.choose(scores))
    for name, fill in step.fills.items():
        whole = named(f"{tokens}: whole step, {name}")
        yield _timed(whole, clock.wall_ms, partial(step.run, fill))


def _timed(
    row: Row,
    clocked: Callable[[Callable[[], object]], float],
    run: Callable[[], object],
    moved_bytes: int | None = None,
    ceiling_gb_per_s: float = 0.0,
) -> Row:
    try:
        row.took(clocked(run), moved_bytes)
    except TooSlowError as error:
        row.note = str(error)
    row.compared_with(ceiling_gb_per_s)
    return row


def _fills(pages: ViewPages) -> dict[str, Callable[[Chosen], None]]:
    return {"layer by layer": pages.fill_by_layers, "block by block": pages.fill_by_blocks}


class _Step:
    """Everything in place for one step."""

    def __init__(
        self, model: Model, space: Workspace, host: HostSlab, view_blocks: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.index = DefaultIndex(model, space, device)
        self.pages = ViewPages(model, host, view_blocks, device)
        self.fills = _fills(self.pages)

    def closely(self) -> torch.Tensor:
        """[blocks]: scores of the blocks of the most wanted runs."""
        return self.index.scores(self.index.shortlist())

    def choose(self, scores: torch.Tensor) -> Chosen:
        """The highest scores, in the order of the workspace. Waits for the device."""
        best = scores.topk(self.pages.blocks).indices
        return self.pages.chosen(best.sort().values.cpu())

    def run(self, fill: Callable[[Chosen], None]) -> None:
        fill(self.choose(self.closely()))
