"""The data plane over a real disk: blocks leave the host, come back, and outlive the process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kvws.blocks.page import PageSource, Slice, whole_block
from kvws.engine.data_plane import DataPlane
from kvws.errors import ConfigError, DiskTierFull, LoadFailed, UnsafeStore
from kvws.store.block_store import BlockStore
from kvws.store.posix import PosixStorage
from kvws.tiers import disk, lift, write_behind
from kvws.tiers.budget import DiskBudget
from kvws.tiers.codec import make_codec
from kvws.tiers.disk import DiskTier, UnsavedBlock
from kvws.tiers.geometry import PayloadGeometry
from kvws.tiers.host import HostTier
from tests.plane.rig import DIM, KV_HEADS, LAYERS, Pool, Rig, rotary_table, rotated, signals_of

HOST_BLOCKS = 6


class DiskRig(Rig):
    """A rig whose plane has a disk tier in a folder; `restart` kills and reopens it."""

    def __init__(
        self,
        folder: Path,
        *,
        disk_format: str = "exact",
        host_format: str = "exact",
        dtype: torch.dtype = torch.float32,
        signals: tuple[str, ...] = ("mean-k",),
    ) -> None:
        table, other = rotary_table(100.0), rotary_table(10.0)
        super().__init__(Pool.random(dtype), [table, other, table], plane=None)  # type: ignore[arg-type]
        self.folder = folder
        self.disk_format = disk_format
        self.host_format = host_format
        self.signals = signals
        self.held: list[int] = []
        self.start()

    def start(self) -> None:
        dtype = self.pool.k_buffer[0].dtype
        geometry = PayloadGeometry(LAYERS, KV_HEADS, DIM, dtype)
        codec = make_codec(self.host_format, geometry, self.tables)
        capacity_bytes = HOST_BLOCKS * codec.payload_bytes
        if self.host_format != "exact":
            capacity_bytes += HOST_BLOCKS * geometry.slot_bytes
        host = HostTier(geometry, capacity_bytes, codec, staged_pages=HOST_BLOCKS)
        enabled = signals_of(self.tables, *self.signals)
        self.disk = DiskTier(
            host,
            make_codec(self.disk_format, geometry, self.tables),
            DiskBudget(1 << 30, self.folder, rank=0),
            PosixStorage(self.folder),
            enabled,
            rank=0,
        )
        self.plane = DataPlane(self.pool, self.tables, host, enabled, self.disk)
        self.held = self.plane.attach("w", str(self.folder))

    def restart(self) -> None:
        self.plane.close()
        self.start()

    def write_pages(self, first_block: int, pages: list[int], *, at: int) -> torch.Tensor:
        """Blocks made of device pages, and their payloads as they were computed."""
        originals = torch.stack([self.pool.page(page) for page in pages])
        self.write(first_block, pages, at=at)
        return originals

    def until_saved(self) -> None:
        eventually(lambda: self.plane.unsaved_blocks("w") == 0)

    def view(self, sources: list[PageSource], pages: list[int]) -> None:
        """One step that loads a view into device pages."""
        step = self.open()
        self.load(step, self.promise(step, sources), pages)
        self.close(step, [])


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.005)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DiskRig]:
    torch.manual_seed(11)
    rig = DiskRig(tmp_path)
    yield rig
    rig.plane.close()


def assert_placed(rig: Rig, page: int, original: torch.Tensor) -> None:
    """A device page holds an original bit for bit: it lies where it was computed."""
    assert torch.equal(rig.pool.page(page), original)


def test_a_workspace_outgrows_the_host_tier(rig: DiskRig) -> None:
    """18 blocks through 6 host slots: every one comes back bit for bit, in any order."""
    originals: list[torch.Tensor] = []
    for block in range(18):
        originals += rig.write_pages(block, [block % 16], at=block)
        rig.until_saved()
    assert rig.plane.stats()["evicted_blocks"] == 12
    assert rig.plane.stats()["lost_only_copies"] == 0
    for block in torch.randperm(18).tolist():
        for page in (16, 17):
            rig.pool.k_buffer[0][page * 32 : page * 32 + 64].zero_()
        other = (block + 7) % 18
        names_at = {block: whole_block(block)}
        step = rig.open()
        sources = [whole_block(other)] * block + [names_at[block]]
        names = rig.promise(step, sources)
        rig.load(step, names[-1:], [16])
        assert_placed(rig, 16, originals[block])
        rig.close(step, [])


def test_blocks_of_a_killed_process_are_served_after_a_restart(rig: DiskRig) -> None:
    originals = rig.write_pages(0, [0, 1, 2, 3], at=0)
    rows = [rig.plane.index_row("w", block) for block in range(4)]
    rig.until_saved()
    rig.restart()
    assert rig.held == [0, 1, 2, 3]
    assert rig.plane.stats()["host_used_blocks"] == 0, "opening reads no payloads"
    for block in range(4):
        assert torch.equal(rig.plane.index_row("w", block), rows[block])
    rig.view([whole_block(block) for block in range(4)], [20, 21, 22, 23])
    for block in range(4):
        assert_placed(rig, 20 + block, originals[block])
    assert rig.plane.stats()["lifted_blocks"] == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_round_trip_over_the_disk_keeps_every_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    rig = DiskRig(tmp_path, dtype=dtype)
    originals = rig.write_pages(0, [0, 1, 2, 3, 4], at=0)
    rig.until_saved()
    rig.restart()
    rig.view([whole_block(block) for block in range(5)], [20, 21, 22, 23, 19])
    for block, page in enumerate((20, 21, 22, 23, 19)):
        assert_placed(rig, page, originals[block])
    rig.plane.close()


def test_slices_of_blocks_from_disk_and_host_fill_one_page(rig: DiskRig) -> None:
    """One page half from disk, half from host equals the same page with both on the host."""
    rig.write_pages(0, [0], at=0)
    rig.write_pages(1, [1], at=3)
    rig.until_saved()
    source = (Slice(0, 0, 16), Slice(1, 16, 16))
    rig.view([source], [20])
    expected = rig.pool.page(20)
    rig.restart()
    rig.view([whole_block(1)], [22])
    assert rig.plane.block_payload("w", 0) is None and rig.plane.block_payload("w", 1) is not None
    rig.view([source], [21])
    assert torch.equal(rig.pool.page(21), expected)


def test_adjacent_blocks_are_read_together(rig: DiskRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.write_pages(0, [0, 1, 2, 3], at=0)
    rig.until_saved()
    rig.restart()
    runs: list[tuple[int, ...]] = []
    read = rig.disk.read

    def noted(workspace: str, run: tuple[int, ...], slots: tuple[int, ...]) -> None:
        runs.append(tuple(run))
        read(workspace, run, slots)

    monkeypatch.setattr(rig.disk, "read", noted)
    rig.view([whole_block(2), whole_block(0), whole_block(1)], [20, 21, 22])
    assert sorted(map(sorted, runs)) == [[0, 1, 2]]


def test_only_what_has_no_host_copy_is_read(rig: DiskRig) -> None:
    rig.write_pages(0, [0, 1, 2, 3], at=0)
    rig.until_saved()
    rig.restart()
    rig.view([whole_block(0), whole_block(1)], [20, 21])
    rig.view([whole_block(0), whole_block(1), whole_block(2)], [20, 21, 22])
    assert rig.plane.stats()["lifted_blocks"] == 3


def test_a_damaged_block_is_missing_and_never_served(rig: DiskRig, tmp_path: Path) -> None:
    originals = rig.write_pages(0, [0, 1, 2], at=0)
    rig.until_saved()
    place = rig.disk.store_of("w").find(1)  # type: ignore[union-attr]
    rig.plane.close()
    (segment,) = (tmp_path / "rank-0").glob("segment-*")
    with segment.open("r+b") as file:
        file.seek(place.slot * (rig.disk.shape.payload_bytes + 4096) + 77)  # type: ignore[union-attr]
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    rig.start()
    step = rig.open()
    names = rig.names(3, step)
    view = list(zip(names, [whole_block(0), whole_block(1), whole_block(2)], strict=True))
    assert rig.plane.promise(step, view) == [1], "it is to be recomputed"
    assert rig.plane.queue_load(step, names, [20, 21, 22]) is None
    rig.close(step, [])
    rig.write(1, [1], at=1)
    rig.until_saved()
    rig.restart()
    rig.view([whole_block(0), whole_block(1), whole_block(2)], [20, 21, 22])
    for block in range(3):
        assert_placed(rig, 20 + block, originals[block])


def test_a_disk_in_trouble_pauses_and_recovers_by_itself(
    rig: DiskRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The session goes on from the host tier; what it had to give up is computed again."""
    monkeypatch.setattr(write_behind, "FIRST_RETRY_S", 0.02)
    write = rig.disk.write
    in_trouble = True

    def failing(workspace: str, blocks: list[UnsavedBlock]) -> None:
        if in_trouble:
            raise OSError(28, "No space left on device")
        write(workspace, blocks)

    monkeypatch.setattr(rig.disk, "write", failing)
    rig.write_pages(0, [0, 1, 2, 3], at=0)
    eventually(lambda: rig.plane.stats()["disk_paused"] == 1)
    assert not rig.plane.backlogged(), "nobody waits for a disk in trouble"
    rig.write_pages(4, [4, 5, 6, 7], at=4)
    assert rig.plane.stats()["lost_only_copies"] == 2
    lost = sorted(set(range(8)) - set(rig.plane._table.blocks_of("w")))
    eventually(lambda: rig.plane.stats()["disk_failed_writes"] > 2)
    in_trouble = False
    eventually(lambda: rig.plane.stats()["disk_backlog_blocks"] == 0)
    assert rig.plane.stats()["disk_paused"] == 0
    assert rig.plane.unsaved_blocks("w") == 2, "what was given up is not acknowledged"
    rig.write(lost[0], [lost[0]], at=lost[0])
    rig.plane.forget("w", lost[1:])
    rig.until_saved()
    assert sum("paused" in record.message for record in caplog.records) == 1
    assert sum("again" in record.message for record in caplog.records) == 1
    rig.restart()
    assert rig.held == sorted(set(range(8)) - set(lost[1:]))


def test_a_folder_of_a_rank_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "rank-0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeStore):
        DiskRig(tmp_path)
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("room", [True, False])
def test_every_block_that_cannot_be_read_is_missing_after_one_attempt(
    rig: DiskRig, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    """Or each attempt of a step would uncover only what it happened to read first. Where there is
    no room to read it before the request is made, it is the load that fails."""
    for block in range(0, 12, 2):
        rig.write_pages(block, [block], at=block)
        rig.until_saved()
    monkeypatch.setattr(lift, "RUN_BLOCKS", 1)
    rig.restart()

    def failing(workspace: str, run: tuple[int, ...], slots: tuple[int, ...]) -> None:
        time.sleep(0.01 * run[0])
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(rig.disk, "read", failing)
    step = rig.open()
    view = [(f"page {block}", whole_block(block)) for block in range(0, 12, 2)]
    if room:
        assert rig.plane.promise(step, view) == list(range(0, 12, 2))
        rig.close(step, [])
        return
    filling = rig.fill_host_with_staged_pages(HOST_BLOCKS)
    assert rig.plane.promise(step, view) == []
    rig.close(filling, [])
    load = rig.plane.queue_load(step, [name for name, _ in view], list(range(10, 16)))
    assert load is not None
    with pytest.raises(LoadFailed):
        rig.plane.fill([load], rig.layers_done.append)
    rig.plane.release_load(load, failed=True)
    assert rig.plane.promise(step, view) == list(range(0, 12, 2))
    rig.close(step, [])


def test_a_disk_that_lags_is_waited_for_before_new_blocks_are_made(
    rig: DiskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it writes, no unsaved block is given up: a full host tier refuses instead."""
    write, stuck = rig.disk.write, True

    def slow(workspace: str, blocks: list[UnsavedBlock]) -> None:
        while stuck:
            time.sleep(0.005)
        write(workspace, blocks)

    monkeypatch.setattr(rig.disk, "write", slow)
    rig.write_pages(0, [0, 1, 2, 3, 4, 5], at=0)
    assert rig.plane.backlogged()
    step = rig.open()
    assert not rig.plane.stage_out(step, ["78" * 32], [9])
    assert rig.plane.stats()["refused_pages"] == 0 and rig.plane.stats()["lost_only_copies"] == 0
    stuck = False
    rig.until_saved()
    assert not rig.plane.backlogged()
    rig.plane.stage_out(step, ["78" * 32], [9])
    assert rig.close(step, [("78" * 32, 6, 6)]).resident == [6]


def test_an_attach_that_fails_leaves_nothing_behind_and_can_be_repeated(
    rig: DiskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.write_pages(0, [0, 1, 2], at=0)
    rig.until_saved()
    rig.plane.drop_workspace("w")
    used = rig.disk.budget.used_bytes

    def failing(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    for method in ("open", "read_rows"):
        with monkeypatch.context() as broken:
            broken.setattr(BlockStore, method, failing)
            with pytest.raises(OSError, match="Input/output"):
                rig.plane.attach("w", str(rig.folder))
        assert rig.plane.stats()["blocks"] == 0 and rig.disk.store_of("w") is None
        assert rig.disk.budget.used_bytes == used
        rig.plane.check_integrity()
    assert rig.plane.attach("w", str(rig.folder)) == [0, 1, 2]


def test_forgotten_blocks_stay_forgotten_after_a_restart(rig: DiskRig) -> None:
    rig.write_pages(0, [0, 1, 2], at=0)
    rig.until_saved()
    rig.plane.forget("w", [1])
    rig.restart()
    assert rig.held == [0, 2]


def test_a_block_forgotten_while_it_is_written_stays_forgotten(
    rig: DiskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = rig.disk.write

    def forgetting(workspace: str, blocks: list[UnsavedBlock]) -> None:
        rig.plane.forget("w", [0])
        write(workspace, blocks)

    monkeypatch.setattr(rig.disk, "write", forgetting)
    rig.write_pages(0, [0], at=0)
    rig.until_saved()
    eventually(lambda: rig.plane.stats()["host_used_blocks"] == 0)
    monkeypatch.undo()
    rig.restart()
    assert rig.held == []


def test_a_workspace_dropped_while_it_is_written_leaves_the_disk_in_order(
    rig: DiskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are closed only when nothing is written to them any more."""
    write, entered, may_go_on = rig.disk.write, threading.Event(), threading.Event()

    def slow(workspace: str, blocks: list[UnsavedBlock]) -> None:
        entered.set()
        assert may_go_on.wait(10)
        write(workspace, blocks)

    monkeypatch.setattr(rig.disk, "write", slow)
    rig.write_pages(0, [0, 1], at=0)
    assert entered.wait(10)
    dropping = threading.Thread(target=rig.plane.drop_workspace, args=("w",))
    dropping.start()
    dropping.join(0.2)
    assert dropping.is_alive() and rig.disk.store_of("w") is not None
    may_go_on.set()
    dropping.join(10)
    assert rig.disk.store_of("w") is None
    eventually(lambda: rig.plane.stats()["host_used_blocks"] == 0)
    stats = rig.plane.stats()
    assert stats["disk_paused"] == stats["disk_failed_writes"] == 0
    rig.plane.check_integrity()


def test_a_promised_view_is_on_the_host_before_its_request_is_made(
    rig: DiskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who decodes waits with the forward pass of who loads: it may not wait for the disk."""
    originals = rig.write_pages(0, [0, 1, 2], at=0)
    rig.until_saved()
    rig.restart()
    step = rig.open()
    names = rig.promise(step, [whole_block(0), whole_block(1), whole_block(2)])
    assert rig.plane.stats()["lifted_blocks"] == 3

    def never(*_: object) -> None:
        raise AssertionError("the disk is read while a forward pass waits")

    monkeypatch.setattr(rig.disk, "read", never)
    rig.load(step, names, [20, 21, 22])
    for block in range(3):
        assert_placed(rig, 20 + block, originals[block])
    rig.close(step, [])


def test_a_step_that_waits_for_the_disk_keeps_no_other_from_opening(
    rig: DiskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.write_pages(0, [0], at=0)
    rig.until_saved()
    rig.restart()
    reading, go = threading.Event(), threading.Event()
    read = rig.disk.read

    def slow(workspace: str, run: tuple[int, ...], slots: tuple[int, ...]) -> None:
        reading.set()
        assert go.wait(10)
        read(workspace, run, slots)

    monkeypatch.setattr(rig.disk, "read", slow)
    step = rig.open()
    promising = threading.Thread(target=rig.promise, args=(step, [whole_block(0)]))
    promising.start()
    assert reading.wait(10)
    other = rig.open()
    assert rig.plane.granted_pages(rig.names(1, step)) == 0, "nothing is promised yet"
    assert rig.plane.promise(other, []) == []
    rig.close(other, [])
    go.set()
    promising.join()
    assert rig.plane.granted_pages(rig.names(1, step)) == 1
    rig.close(step, [])


def test_near_misses_are_brought_up_ahead_of_need(rig: DiskRig) -> None:
    rig.write_pages(0, [0, 1, 2, 3], at=0)
    rig.until_saved()
    rig.restart()
    assert rig.plane.look_ahead("w", [2, 0, 77]) == 2
    eventually(lambda: rig.plane.stats()["lifted_blocks"] == 2)
    assert rig.plane.block_payload("w", 2) is not None
    assert rig.plane.look_ahead("w", [2, 0]) == 0
    rig.plane.check_integrity()


def test_a_look_ahead_takes_no_room_from_blocks_in_use(rig: DiskRig) -> None:
    for block in range(8):
        rig.write_pages(block, [block], at=block)
        rig.until_saved()
    pinned = rig.fill_host_with_staged_pages(HOST_BLOCKS)
    assert rig.plane.look_ahead("w", [0, 1]) == 0
    rig.close(pinned, [])


@pytest.mark.parametrize("host_format", ["exact", "as on disk"])
@pytest.mark.parametrize("disk_format", ["int8", "fp8", "int4"])
def test_a_quantised_block_comes_back_near_its_bits_at_any_place(
    tmp_path: Path, disk_format: str, host_format: str
) -> None:
    torch.manual_seed(3)
    host_format = disk_format if host_format == "as on disk" else host_format
    rig = DiskRig(tmp_path, disk_format=disk_format, host_format=host_format)
    originals = rig.write_pages(0, [0, 1, 2], at=4)
    rows = [rig.plane.index_row("w", block) for block in range(3)]
    worst = {"int8": 0.02, "fp8": 0.15, "int4": 0.35}[disk_format]
    for pages in ([20, 21], [22, 23]):
        rig.view([whole_block(1), whole_block(2)], pages)
        for view_index, page in enumerate(pages):
            got, original = rig.pool.page(page), originals[1 + view_index]
            for layer, table in enumerate(rig.tables):
                baked = torch.arange(32) + 32 * (5 + view_index)
                target = torch.arange(32) + 32 * view_index
                expected = rotated(original[0, layer], table, baked, target)
                assert (got[0, layer] - expected).abs().max() < worst
            assert (got[1] - original[1]).abs().max() < worst
            quantised = page > 21 or host_format != "exact"
            assert torch.equal(got[1], original[1]) != quantised
        rig.until_saved()
        rig.restart()
    for block in range(3):
        assert torch.equal(rig.plane.index_row("w", block), rows[block]), "the index is exact"
    rig.plane.close()


def test_a_page_that_a_quantised_block_already_was_is_adopted_as_a_copy(tmp_path: Path) -> None:
    rig = DiskRig(tmp_path, disk_format="int8", host_format="int8")
    (name,) = rig.write(0, [0], at=3)
    step = rig.open()
    assert rig.plane.stage_out(step, [name], [0])
    assert rig.close(step, [(name, 1, 3)]).resident == [1]
    rig.until_saved()
    rig.restart()
    assert rig.held == [0, 1]
    rig.view([whole_block(0), whole_block(1)], [20, 21])
    assert torch.equal(rig.pool.page(20)[1], rig.pool.page(21)[1])
    rig.plane.close()


def test_a_full_quantised_tier_keeps_none_of_a_step_that_finds_no_room(tmp_path: Path) -> None:
    rig = DiskRig(tmp_path, disk_format="int8", host_format="int8")
    rig.write(0, [0, 1, 2, 3, 4])
    rig.until_saved()
    step = rig.open()
    names = rig.promise(step, [whole_block(n) for n in range(5)])
    load = rig.plane.queue_load(step, names, [10, 11, 12, 13, 14])
    assert load is not None
    other = rig.open()
    rig.plane.stage_out(other, ["aa" * 32, "bb" * 32], [5, 6])
    outcome = rig.close(other, [("aa" * 32, 5, 5), ("bb" * 32, 6, 6)])
    assert outcome.resident == [] and outcome.refused_pages == 2
    rig.plane.release_load(load)
    rig.plane.close()


def test_a_quantised_host_tier_cannot_feed_a_finer_disk(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot become exact") as refused:
        DiskRig(tmp_path, disk_format="exact", host_format="int8")
    assert "--disk-format int8" in refused.value.hint


def test_the_budget_counts_workspaces_that_nobody_has_open(rig: DiskRig, tmp_path: Path) -> None:
    rig.write_pages(0, [0], at=0)
    rig.until_saved()
    used = rig.disk.budget.used_bytes
    assert used > 0
    rig.plane.close()
    nested = tmp_path / "root" / "one"
    nested.parent.mkdir()
    (tmp_path / "rank-0").parent.joinpath("rank-0").rename(nested.parent / "moved")
    nested.mkdir()
    (nested.parent / "moved").rename(nested / "rank-0")
    budget = DiskBudget(used, nested.parent, rank=0)
    assert budget.used_bytes >= used // 2
    with pytest.raises(DiskTierFull, match="more are needed"):
        budget.take(used)
    budget.opening(nested / "rank-0")
    assert budget.used_bytes == 0
    rig.start()



# ---- other signals ---------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["exact", "int8"])
def test_rows_are_made_anew_when_a_workspace_is_opened_with_other_signals(
    tmp_path: Path, format: str
) -> None:
    """Those of bit-exact payloads are what they would have been from the start."""
    torch.manual_seed(3)
    every = ("mean-k", "rotated-mean", "content")
    for folder in "ab":
        (tmp_path / folder).mkdir(mode=0o700)
    originals = DiskRig(tmp_path / "a", disk_format=format, signals=every)
    originals.write_pages(0, [0, 1, 2, 3], at=4)
    expected = [originals.plane.index_row("w", block) for block in range(4)]

    rig = DiskRig(tmp_path / "b", disk_format=format)
    rig.pool = originals.pool
    rig.restart()
    rig.write_pages(0, [0, 1, 2, 3], at=4)
    rig.until_saved()
    narrow = rig.plane.index_row("w", 2)
    rig.signals = every
    rig.restart()
    assert rig.held == [0, 1, 2, 3] and rig.plane.stats()["host_used_blocks"] == 0
    for block in range(4):
        row, wanted = rig.plane.index_row("w", block), expected[block]
        assert row is not None and wanted is not None and narrow is not None
        assert len(row) > len(narrow)
        if format == "exact":
            assert torch.equal(row, wanted)
            continue
        for made, computed in zip(
            rig.disk.signals.parts(row.unsqueeze(0)),
            rig.disk.signals.parts(wanted.unsqueeze(0)),
            strict=True,
        ):
            assert (made[0].float() - computed[0].float()).abs().max() < 0.05
    originals.plane.close()
    rig.plane.close()


def test_rows_are_made_a_few_blocks_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = DiskRig(tmp_path, signals=("content",))
    rig.write_pages(0, [0, 1, 2, 3, 4], at=0)
    rig.until_saved()
    rig.signals = ("rotated-mean",)
    rig.restart()
    together = [rig.plane.index_row("w", block) for block in range(5)]
    rig.signals = ("content",)
    rig.restart()
    monkeypatch.setattr(disk, "_REINDEX_BYTES", 2 * rig.disk.shape.payload_bytes)
    rig.signals = ("rotated-mean",)
    rig.restart()
    for block in range(5):
        row, other = rig.plane.index_row("w", block), together[block]
        assert row is not None and other is not None and torch.equal(row, other)
    rig.plane.close()
