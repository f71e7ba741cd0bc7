"""A deterministic engine in this process: what SGLang and the linker do, over the real data plane.

Real: data plane, kernels, tap, control messages (packed and unpacked). Simulated: the prefix tree,
its slots, the scheduler, and a model whose KV is a function of (token, everything attended).

A token's V spells a digest of all V bytes before it, of its page's tokens and of itself, so one
wrong page changes the V of everything computed behind it, and the answer. Its raw K is the unit
vector of its topic and a trace of the digest; a query row is the unit vector of the token's topic:
a query about topic t scores the blocks about t.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvws.blocks.key import BLOCK_TOKENS, page_hashes
from kvws.blocks.page import PageSource
from kvws.engine import wire
from kvws.engine.data_plane import DataPlane
from kvws.engine.operations import Operations
from kvws.engine.protocol import Chunk, ClosedStep, GenerateRequest, Scores
from kvws.engine.scores import runs_of_ranks, scores_of_ranks
from kvws.engine.scoring_device import ScoringDevice
from kvws.engine.tap import QueryTap
from kvws.errors import EngineError, LoadFailed
from kvws.kernels.rotary import RotaryTable
from kvws.recall.profile import Profile
from kvws.recall.signals.build import KeyGeometry, enabled_signals
from kvws.store.storage import Storage
from kvws.tiers.budget import DiskBudget
from kvws.tiers.codec import make_codec
from kvws.tiers.disk import DiskTier
from kvws.tiers.geometry import PayloadGeometry
from kvws.tiers.host import HostTier

LAYERS, QUERY_HEADS, DIM = 2, 2, 8
TOPICS = 8
PROFILE = Profile(
    "simulated", LAYERS, QUERY_HEADS, 1, DIM, ((0, 1), (1, 0)), (), content_keys="int8"
)
GEOMETRY = PayloadGeometry(layers=LAYERS, kv_heads=1, head_dim=DIM, dtype=torch.float32)
_HEADROOM_TOKENS = 8
_K_TOLERANCE = 1e-4


def topic_of(token: int) -> int:
    return token // 1000 % TOPICS


@dataclass(eq=False)
class Node:
    """Pages that were inserted together. `stored` nodes are never offered again."""

    hashes: list[str]
    stored: bool = False


@dataclass(eq=False)
class Page:
    """One page of the prefix tree; its parent is the page before it."""

    hash: str
    parent: str | None
    device_page: int
    node: Node
    locks: int = 0
    last_used: int = 0


@dataclass
class Faults:
    """What goes wrong, where.

    Attributes:
        before_load: called between lookup and the queueing of a load.
        during_load: called while a load's blocks are pinned.
        lookup: pages reported of those granted; fewer are computed as text under the same names.
        fail_loads: next loads that fail though their bytes are there.
        refuse_stage_out: every offer is refused.
        slow_abort: turns of the event loop until an abort takes effect.
        deaf_tap: no query row is delivered.
        after_first_chunk: raised by the next request after its first chunk.
    """

    before_load: Callable[[GenerateRequest], None] | None = None
    during_load: Callable[[GenerateRequest], None] | None = None
    lookup: Callable[[GenerateRequest, int], int] | None = None
    fail_loads: int = 0
    refuse_stage_out: bool = False
    slow_abort: int = 0
    deaf_tap: bool = False
    after_first_chunk: Exception | None = None


class _Content(NamedTuple):
    """What a computed page held: raw K and V [layers, 32, 1, dim] and its tokens."""

    raw_k: torch.Tensor
    v: torch.Tensor
    tokens: tuple[int, ...]


@dataclass(eq=False)
class _Run:
    """One request on the device: tree pages on its path (locked), then pages of its own."""

    request: GenerateRequest
    tokens: list[int]
    path: list[Page] = field(default_factory=list[Page])
    own: list[int] = field(default_factory=list[int])
    computed: int = 0
    inserted_pages: int = 0
    page_digests: list[bytes] = field(default_factory=list[bytes])
    cached_tokens: int = 0
    finished: bool = False

    @property
    def device_pages(self) -> list[int]:
        return [page.device_page for page in self.path] + self.own


class SimulatedEngine:
    """Implements `kvws.engine.protocol.Engine`."""

    def __init__(
        self,
        *,
        context_tokens: int,
        device_pages: int = 64,
        host_blocks: int = 1000,
        chunk_tokens: int = 64,
        storage: Storage | None = None,
        disk_format: str = "exact",
        signals: tuple[str, ...] = ("mean-k",),
    ) -> None:
        """`storage`: the disk below the host tier; it outlives the engine."""
        self.room_for_rows: int | None = None
        self._arguments = {
            "context_tokens": context_tokens,
            "device_pages": device_pages,
            "host_blocks": host_blocks,
            "chunk_tokens": chunk_tokens,
            "storage": storage,
            "disk_format": disk_format,
            "signals": signals,
        }
        angle = torch.arange(4096, dtype=torch.float64).unsqueeze(1) * 100.0 ** (
            -torch.arange(0, DIM, 2, dtype=torch.float64) / DIM
        )
        self._turns = torch.complex(angle.cos(), angle.sin())
        table = RotaryTable(angle.cos().float(), angle.sin().float(), interleaved=False)
        slots = (device_pages * BLOCK_TOKENS, 1, DIM)
        self.k_buffer = [torch.full(slots, torch.nan) for _ in range(LAYERS)]
        self.v_buffer = [torch.full(slots, torch.nan) for _ in range(LAYERS)]
        self.host = HostTier(GEOMETRY, host_blocks * GEOMETRY.slot_bytes)
        tables = [table] * LAYERS
        enabled = enabled_signals(signals, KeyGeometry(LAYERS, 1, DIM), tables, PROFILE)
        self.disk = (
            DiskTier(
                self.host,
                make_codec(disk_format, GEOMETRY, tables),
                DiskBudget(1 << 30, Path("/nowhere"), rank=0),
                storage,
                enabled,
                rank=0,
            )
            if storage is not None
            else None
        )
        self.plane = DataPlane(self, tables, self.host, enabled, self.disk)
        self.tap = QueryTap()
        self._operations = Operations(
            self.plane,
            self.tap,
            tables,
            SimpleNamespace(size=slots[0]),
            ScoringDevice(None, ""),
            rank=0,
            weights="simulated",
        )
        self._context_tokens = context_tokens
        self._chunk_tokens = chunk_tokens
        self._device_pages = device_pages
        self._free = list(range(device_pages))
        self._tree: dict[str, Page] = {}
        self._clock = 0
        self._running: set[_Run] = set()
        self._control_lock = asyncio.Lock()
        self._background: set[asyncio.Task[None]] = set()

        self.faults = Faults()
        self.speak: Callable[[GenerateRequest], int] | None = None  # instead of nonsense
        self.stop_tokens: frozenset[int] = frozenset()
        self.requests: list[GenerateRequest] = []
        self.answered: dict[str, Chunk] = {}
        self.wrong_pages: list[str] = []
        self._workspace_of: dict[str, str] = {}
        self._views: dict[str, dict[str, PageSource]] = {}
        self._computed: dict[str, list[_Content]] = {}
        self._poison: set[bytes] = set()
        self._truth: dict[tuple[str, int], _Content] = {}
        self._versions: dict[tuple[str, tuple[int, ...]], list[_Content]] = {}

    # ---- the protocol ------------------------------------------------------------------------

    @property
    def context_tokens(self) -> int:
        return self._context_tokens

    @property
    def block_bytes(self) -> int:
        return GEOMETRY.block_bytes

    @property
    def scored_at_once_blocks(self) -> int | None:
        return self.room_for_rows

    async def open_step(self, step: str, workspace: str) -> None:
        def note(_: Any) -> None:
            self._workspace_of[step] = workspace
            self._views[step] = {}

        await self._control("open_step", note, step=step, workspace=workspace)

    async def promise(self, step: str, view: Sequence[tuple[str, PageSource]]) -> list[int]:
        def note(missing: list[int]) -> None:
            if not missing:
                self._views[step].update(view)

        return await self._control("promise", note, step=step, view=list(view))

    async def close_step(self, step: str, named: Sequence[tuple[str, int, int]]) -> ClosedStep:
        def note(reply: dict[str, Any]) -> None:
            del self._views[step]
            self._learn(self._workspace_of[step], named, reply["resident"])

        reply = await self._control("close_step", note, step=step, named=list(named))
        return ClosedStep(
            resident=frozenset(reply["resident"]),
            host_full=bool(reply["refused_pages"]),
            loaded_pages=reply["loaded_pages"],
            stage_in_ms=reply["stage_in_ms"],
        )

    async def forget(self, workspace: str, blocks: Sequence[int]) -> None:
        self.plane.forget(workspace, blocks)

    async def attach(self, workspace: str, directory: str) -> frozenset[int]:
        return frozenset(await self._control("attach", workspace=workspace, directory=directory))

    async def unsaved_blocks(self, workspace: str) -> int:
        return await self._control("unsaved_blocks", workspace=workspace)

    async def look_ahead(self, workspace: str, blocks: Sequence[int]) -> None:
        await self._control("look_ahead", workspace=workspace, numbers=list(blocks))

    async def drop_workspace(self, workspace: str) -> None:
        await self._control("drop_workspace", workspace=workspace)

    async def watch_queries(self, rid: str, first_position: int) -> None:
        await self._control("watch", rid=rid, first_position=first_position)

    async def score(
        self,
        rid: str,
        workspace: str,
        candidates: bytes,
        first_positions: bytes,
        query_first: int,
        content_rows: bytes = b"",
    ) -> Scores:
        reply = await self._control(
            "score",
            rid=rid,
            workspace=workspace,
            candidates=candidates,
            first_positions=first_positions,
            query_first=query_first,
            content_rows=content_rows,
        )
        return scores_of_ranks([reply])

    async def score_runs(
        self, rid: str, workspace: str, content_rows: bytes = b""
    ) -> npt.NDArray[np.float32] | None:
        arguments = {"rid": rid, "workspace": workspace, "content_rows": content_rows}
        return runs_of_ranks([await self._control("score_runs", **arguments)])

    async def stats(self) -> list[dict[str, int]]:
        device_used_bytes = len(self._tree) * GEOMETRY.block_bytes
        return [{**self.plane.stats(), "device_used_bytes": device_used_bytes}]

    async def check_integrity(self) -> None:
        await self._control("check_integrity")

    def abort(self, rid: str) -> None:
        for run in list(self._running):
            if run.request.rid == rid:
                self._finish(run)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        self._require_fits(request)
        self.requests.append(request)
        run = _Run(request, list(request.token_ids))
        self._running.add(run)
        try:
            await asyncio.sleep(0)
            await self._begin(run)
            while run.computed < len(run.tokens):
                end = min(run.computed + self._chunk_tokens, len(run.tokens))
                self._compute(run, end)
                self._insert(run)
                await asyncio.sleep(0)
            generated, reason, token = 0, "length", -1
            while generated < request.max_new_tokens:
                token = self._next_token(run) if self.speak is None else self.speak(request)
                run.tokens.append(token)
                generated += 1
                if token in self.stop_tokens:
                    reason = "stop"
                    break
                if generated == request.max_new_tokens:
                    break
                yield self._answer(run, (token,), None)
                if self.faults.after_first_chunk is not None:
                    error, self.faults.after_first_chunk = self.faults.after_first_chunk, None
                    raise error
                await asyncio.sleep(0)
                self._compute(run, len(run.tokens), tapped=False)
            self._finish(run)
            last = (run.tokens[-1],) if request.max_new_tokens else ()
            matched = token if reason == "stop" else None
            yield replace(self._answer(run, last, reason), matched_stop=matched)
        finally:
            if not run.finished:
                if self.faults.slow_abort:
                    task = asyncio.create_task(self._finish_later(run))
                    self._background.add(task)
                    task.add_done_callback(self._background.discard)
                else:
                    self._finish(run)

    # ---- what tests do to it -----------------------------------------------------------------

    def lose(self, workspace: str, blocks: Sequence[int]) -> None:
        """Lose the bytes of blocks."""
        self.plane.forget(workspace, blocks)

    def restarted(self, **changes: Any) -> SimulatedEngine:
        """A new engine on the same disk, after this one was killed. It knows what this one
        computed, so that it can tell whether a view is right."""
        self.plane.close()
        heir = SimulatedEngine(**{**self._arguments, **changes})
        heir._truth, heir._versions = self._truth, self._versions
        heir._computed, heir._poison = self._computed, self._poison
        return heir

    def flush_device_cache(self) -> None:
        """Empty the tree; what requests hold stays."""
        while self._evict_one():
            pass

    async def settle(self) -> None:
        """Wait for slow aborts."""
        while self._background:
            await asyncio.gather(*self._background)

    def check_idle(self) -> None:
        """No request runs: every device page is free or in the tree, nothing is locked or pinned.

        No view was ever served from a page that does not hold its block.
        """
        assert not self.wrong_pages, self.wrong_pages
        assert not self._running and not self._views
        held = [page.device_page for page in self._tree.values()]
        assert sorted(held + self._free) == list(range(self._device_pages)), "a page leaked"
        assert not any(page.locks for page in self._tree.values()), "a lock leaked"
        assert self.tap.watched == 0, "a watched request leaked"
        self.plane.check_integrity()
        stats = self.plane.stats()
        assert stats["open_steps"] == 0
        if self.disk is None:
            assert stats["host_used_bytes"] == stats["blocks"] * GEOMETRY.block_bytes

    def check_blocks(self, workspace: str) -> None:
        """Every resident block has the bits it was computed with."""
        for name, number in list(self._truth):
            found = self.plane.block_payload(name, number)
            if name == workspace and found is not None:
                content = self._truth[name, number]
                payload, first = found
                assert torch.equal(payload[1], content.v), f"block {number} holds other bits"
                self._assert_keys(payload[0], content.raw_k, range(first, first + BLOCK_TOKENS))

    def resident(self, workspace: str) -> list[int]:
        return self.plane._table.blocks_of(workspace)

    # ---- scheduling --------------------------------------------------------------------------

    def _require_fits(self, request: GenerateRequest) -> None:
        prompt = len(request.token_ids)
        if prompt > self._context_tokens - _HEADROOM_TOKENS:
            raise EngineError(f"a prompt of {prompt} tokens exceeds {self._context_tokens}")
        if prompt + request.max_new_tokens > self._context_tokens:
            raise EngineError(f"{prompt} + {request.max_new_tokens} exceeds the context")

    async def _begin(self, run: _Run) -> None:
        """Match the tree, then load what is promised behind it."""
        request = run.request
        longest = len(run.tokens) - 1
        if request.compute_from is not None:
            longest = min(longest, request.compute_from)
        hashes = page_hashes(run.tokens, request.namespace)[: longest // BLOCK_TOKENS]
        run.path = self._match(hashes)
        self._lock(run.path, 1)
        tail = hashes[len(run.path) :]
        granted = self.plane.granted_pages(tail)
        if self.faults.lookup is not None:
            granted = max(0, min(granted, self.faults.lookup(request, granted)))
        if granted:
            await self._load(run, tail[:granted])
        run.inserted_pages = 0
        run.cached_tokens = run.computed = BLOCK_TOKENS * len(run.device_pages)
        self._verify_view(run, hashes)
        for page in run.device_pages:
            self._close_page_digest(run, page)

    async def _load(self, run: _Run, hashes: list[str]) -> None:
        request = run.request
        run.own = self._allocate(len(hashes))
        if self.faults.before_load is not None:
            self.faults.before_load(request)
        load = self.plane.queue_load(request.rid.rpartition(".")[0], hashes, run.own)
        if load is None:
            raise LoadFailed("a promised page lost its bytes before it was loaded")
        failed = self.faults.fail_loads > 0
        layers: list[int] = []
        try:
            if self.faults.during_load is not None:
                self.faults.during_load(request)
            await asyncio.sleep(0)
            if failed:
                self.faults.fail_loads -= 1
                raise LoadFailed("stage-in failed")
            self.plane.fill([load], layers.append)
        finally:
            self.plane.release_load(load, failed=failed)
        assert layers == list(range(LAYERS))

    def _compute(self, run: _Run, end: int, *, tapped: bool = True) -> None:
        """Write the KV of tokens up to `end`, page by page."""
        begin = run.computed
        missing = -(-end // BLOCK_TOKENS) - len(run.device_pages)
        run.own += self._allocate(max(0, missing))
        while run.computed < end:
            page, within = divmod(run.computed, BLOCK_TOKENS)
            stop = min(end, (page + 1) * BLOCK_TOKENS)
            tokens = run.tokens[page * BLOCK_TOKENS : stop]
            raw_k, v = _keys_and_values(self._digest_before(run, page), tokens, within)
            slots = _slots(run.device_pages[page])[within : within + v.shape[1]]
            positions = torch.arange(run.computed, stop)
            for layer in range(LAYERS):
                self.k_buffer[layer][slots] = self._rotated(raw_k[layer], positions).float()
                self.v_buffer[layer][slots] = v[layer]
            run.computed = stop
            if stop == (page + 1) * BLOCK_TOKENS:
                self._remember_page(run, page)
        if tapped and not self.faults.deaf_tap:
            self._tap(run, begin, end)

    def _tap(self, run: _Run, begin: int, end: int) -> None:
        positions = torch.arange(begin, end)
        raw = torch.zeros(end - begin, QUERY_HEADS, DIM)
        for row, token in enumerate(run.tokens[begin:end]):
            raw[row, :, topic_of(token)] = 4.0
        rotated = self._rotated(raw, positions).float().flatten(1)
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_extend=lambda: True),
            rids=[run.request.rid],
            extend_seq_lens_cpu=[end - begin],
            positions=positions,
        )
        for layer in range(LAYERS):
            facts = {"tp_q_head_num": QUERY_HEADS, "qk_head_dim": DIM, "layer_id": layer}
            self.tap.catch(rotated, SimpleNamespace(**facts), batch)

    def _next_token(self, run: _Run) -> int:
        """The answer depends on every V byte before it."""
        page, within = divmod(run.computed - 1, BLOCK_TOKENS)
        tokens = run.tokens[page * BLOCK_TOKENS : run.computed]
        digest = _token_digest(self._digest_before(run, page), tokens, within)
        return 7000 + int.from_bytes(digest[:4], "little") % 1000

    def _finish(self, run: _Run) -> None:
        """Hand full pages to the tree, free the rest."""
        if run.finished:
            return
        run.finished = True
        if run.computed:
            self._insert(run)
        self._lock(run.path, -1)
        self._free += run.own
        run.own, run.path = [], []
        self._running.discard(run)

    async def _finish_later(self, run: _Run) -> None:
        for _ in range(self.faults.slow_abort):
            await asyncio.sleep(0)
        self._finish(run)

    def _answer(self, run: _Run, tokens: tuple[int, ...], reason: str | None) -> Chunk:
        chunk = Chunk(tokens, reason, run.cached_tokens)
        self.answered.setdefault(run.request.rid, chunk)
        return chunk

    # ---- the tree ----------------------------------------------------------------------------

    def _match(self, hashes: Sequence[str]) -> list[Page]:
        path: list[Page] = []
        self._clock += 1
        for page_hash in hashes:
            page = self._tree.get(page_hash)
            if page is None:
                break
            page.last_used = self._clock
            path.append(page)
        self._split_behind(path)
        return path

    def _split_behind(self, path: list[Page]) -> None:
        """A node that the path leaves in its middle becomes two, stored or not as it was."""
        if path and path[-1].node.hashes[-1] != path[-1].hash:
            node = path[-1].node
            cut = node.hashes.index(path[-1].hash) + 1
            front = Node(node.hashes[:cut], node.stored)
            del node.hashes[:cut]
            for page_hash in front.hashes:
                self._tree[page_hash].node = front

    def _insert(self, run: _Run) -> None:
        """Full pages join the tree; nodes not stored and not yet counted for are offered."""
        full = run.computed // BLOCK_TOKENS
        hashes = page_hashes(run.tokens[: full * BLOCK_TOKENS], run.request.namespace)
        old_path, mine = run.path, run.device_pages
        path = self._match(hashes)
        known = len(path)
        fresh = Node(list(hashes[known:]))
        for index in range(known, full):
            parent = hashes[index - 1] if index else None
            page = Page(hashes[index], parent, mine[index], fresh, last_used=self._clock)
            self._tree[page.hash] = page
            path.append(page)
        self._free += [
            mine[index]
            for index in range(len(old_path), known)
            if mine[index] != path[index].device_page
        ]
        self._lock(path, 1)
        self._lock(old_path, -1)
        run.path, run.own = path, mine[full:]
        self._offer(run, path)
        run.inserted_pages = full

    def _offer(self, run: _Run, path: list[Page]) -> None:
        end = 0
        for node in dict.fromkeys(page.node for page in path):
            end += len(node.hashes)
            if node.stored or end <= run.inserted_pages or self.faults.refuse_stage_out:
                continue
            pages = [self._tree[h].device_page for h in node.hashes]
            node.stored = self.plane.stage_out(run.request.step, node.hashes, pages)

    def _allocate(self, count: int) -> list[int]:
        while len(self._free) < count:
            assert self._evict_one(), "the device pool is too small for the requests in flight"
        taken, self._free = self._free[:count], self._free[count:]
        for page in taken:
            for buffer in (*self.k_buffer, *self.v_buffer):
                buffer[_slots(page)] = torch.nan
        return taken

    def _evict_one(self) -> bool:
        """Drop the least recently used node that nothing continues."""
        parents = {page.parent for page in self._tree.values()}
        leaves = [
            page
            for page in self._tree.values()
            if page.hash not in parents and page.hash == page.node.hashes[-1] and not page.locks
        ]
        leaves = [p for p in leaves if not any(self._tree[h].locks for h in p.node.hashes)]
        if not leaves:
            return False
        victim = min(leaves, key=lambda page: page.last_used)
        for page_hash in victim.node.hashes:
            self._free.append(self._tree.pop(page_hash).device_page)
        return True

    @staticmethod
    def _lock(path: list[Page], by: int) -> None:
        for page in path:
            page.locks += by

    # ---- what the bits should be -------------------------------------------------------------

    def _rotated(self, raw: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, dim] in fp64, each pair turned by its position."""
        half = DIM // 2
        pairs = torch.complex(raw[..., :half].double(), raw[..., half:].double())
        turned = pairs * self._turns[positions].unsqueeze(1)
        return torch.cat([turned.real, turned.imag], dim=-1)

    def _digest_before(self, run: _Run, page: int) -> bytes:
        return run.page_digests[page - 1] if page else b""

    def _close_page_digest(self, run: _Run, device_page: int) -> None:
        """Chain the V bytes that the pool really holds for the run's next page."""
        before = run.page_digests[-1] if run.page_digests else b""
        v = b"".join(b[_slots(device_page)].numpy().tobytes() for b in self.v_buffer)
        run.page_digests.append(hashlib.blake2b(before + v, digest_size=16).digest())

    def _remember_page(self, run: _Run, page: int) -> None:
        """A page was computed: what its bits were, and the digest behind it."""
        tokens = run.tokens[page * BLOCK_TOKENS : (page + 1) * BLOCK_TOKENS]
        raw_k, v = _keys_and_values(self._digest_before(run, page), tokens, 0)
        name = page_hashes(run.tokens[: (page + 1) * BLOCK_TOKENS], run.request.namespace)[-1]
        promised = self._views.get(run.request.step or "", {})
        if name in promised:
            self._poison.add(v.numpy().tobytes())
        self._computed.setdefault(name, []).append(_Content(raw_k, v, tuple(tokens)))
        self._close_page_digest(run, run.device_pages[page])

    def _learn(
        self, workspace: str, named: Sequence[tuple[str, int, int]], resident: list[int]
    ) -> None:
        """A step was closed: what its new blocks are, checked against what was computed."""
        for page_hash, number, index in named:
            found = self.plane.block_payload(workspace, number)
            if number not in resident:
                continue
            known = self._truth.get((workspace, number))
            if found is None:  # a block that was there before, and is on disk alone
                on_disk = self.disk is not None and self.plane._table.find((workspace, number))
                assert on_disk and known, f"block {number} is reported and not there"
                continue
            payload, first = found
            if known is not None and torch.equal(payload[1], known.v):
                continue
            assert first == index * BLOCK_TOKENS
            for content in self._computed[page_hash]:
                if torch.equal(payload[1], content.v):
                    positions = range(first, first + BLOCK_TOKENS)
                    self._assert_keys(payload[0], content.raw_k, positions)
                    assert content.v.numpy().tobytes() not in self._poison
                    self._truth[workspace, number] = content
                    self._versions.setdefault((workspace, content.tokens), []).append(content)
                    break
            else:
                raise AssertionError(f"block {number} holds bits that were never computed for it")

    def _verify_view(self, run: _Run, hashes: Sequence[str]) -> None:
        """Every promised page that the request was given holds its blocks, at its place."""
        step = run.request.step
        if step is None:
            return
        for index, (page_hash, device_page) in enumerate(
            zip(hashes, run.device_pages, strict=False)
        ):
            source = self._views[step].get(page_hash)
            if source is None or self._was_computed(page_hash, device_page):
                continue
            row = index * BLOCK_TOKENS
            slots = _slots(device_page)
            for block, offset, length in source:
                of_block = slice(offset, offset + length)
                if not self._holds(step, block, of_block, slots[:length], row):
                    self.wrong_pages.append(f"{run.request.rid}: page {index} is not {source}")
                row, slots = row + length, slots[length:]

    def _was_computed(self, page_hash: str, device_page: int) -> bool:
        """Whether the page was computed in this very place, and not in place of a promise."""
        v = torch.stack([buffer[_slots(device_page)] for buffer in self.v_buffer])
        if v.numpy().tobytes() in self._poison:
            return False
        return any(torch.equal(v, content.v) for content in self._computed.get(page_hash, ()))

    def _holds(
        self, step: str, block: int, of_block: slice, slots: torch.Tensor, position: int
    ) -> bool:
        """Whether slots hold part of a block, as it is or was before it was lost, or of another
        block of the same tokens: the tree cannot tell them apart."""
        workspace = self._workspace_of[step]
        tokens = self._truth[workspace, block].tokens
        v = torch.stack([buffer[slots] for buffer in self.v_buffer])
        for content in self._versions[workspace, tokens]:
            if torch.equal(v, content.v[:, of_block]):
                keys = torch.stack([buffer[slots] for buffer in self.k_buffer])
                positions = range(position, position + len(slots))
                self._assert_keys(keys, content.raw_k[:, of_block], positions)
                return True
        return False

    def _assert_keys(self, keys: torch.Tensor, raw_k: torch.Tensor, positions: range) -> None:
        """[layers, tokens, 1, dim]: the raw keys, turned to their positions."""
        for layer in range(LAYERS):
            expected = self._rotated(raw_k[layer], torch.tensor(positions))
            error = float((keys[layer].double() - expected).abs().max())
            assert error < _K_TOLERANCE, f"keys at {positions} are off by {error}"

    async def _control(
        self, operation: str, note: Callable[[Any], None] | None = None, **arguments: Any
    ) -> Any:
        """One exchange over the control socket; a caller that is cancelled does not stop it."""
        return await asyncio.shield(self._exchange(operation, note, arguments))

    async def _exchange(
        self, operation: str, note: Callable[[Any], None] | None, arguments: dict[str, Any]
    ) -> Any:
        """Packed, answered in order, late."""
        async with self._control_lock:
            await asyncio.sleep(0)
            request = wire.unpack(wire.pack(arguments))
            reply = wire.unpack(wire.pack(self._operations.handle(operation, request)))
            if note is not None:
                note(reply)
            await asyncio.sleep(0)
            return reply


def _slots(device_page: int) -> torch.Tensor:
    return torch.arange(device_page * BLOCK_TOKENS, (device_page + 1) * BLOCK_TOKENS)


def _token_digest(before: bytes, tokens: Sequence[int], within: int) -> bytes:
    """Of the token at `within` of a page that holds `tokens`, behind pages digested so far."""
    spelled = np.array(tokens[: within + 1], dtype="<u4").tobytes()
    return hashlib.blake2b(before + spelled, digest_size=2 * DIM).digest()


def _keys_and_values(
    before: bytes, tokens: Sequence[int], first: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Raw K and V [layers, tokens, 1, dim] of a page's tokens from `first` on."""
    digests = b"".join(_token_digest(before, tokens, i) for i in range(first, len(tokens)))
    spelled = np.frombuffer(digests, dtype="<u2").reshape(-1, 1, DIM).astype(np.float32)
    trace = torch.from_numpy(spelled / 65536.0 - 0.5)
    topics = torch.zeros_like(trace)
    for row, token in enumerate(tokens[first:]):
        topics[row, :, topic_of(token)] = 4.0
    raw_k = torch.stack([topics + 0.1 * trace * (layer + 1) for layer in range(LAYERS)])
    return raw_k, torch.stack([trace + layer for layer in range(LAYERS)])
