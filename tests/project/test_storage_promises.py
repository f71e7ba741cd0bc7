"""docs/storage-format.md: its tests exist, its numbers are the code's, its layouts read files."""

from __future__ import annotations

import ast
import asyncio
import errno
import importlib
import re
import struct
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from click.testing import CliRunner

from kvws.blocks.page import whole_block
from kvws.cli.main import main
from kvws.engine import launch
from kvws.errors import StoreFormatError
from kvws.kernels.rotary import RotaryTable
from kvws.observe.step_report import StepReport
from kvws.session.commit import BlockRecord, Commit, StepRecord, ThreadRecord, encode_commit
from kvws.session.journal import SessionJournal
from kvws.session.workspace import Workspace
from kvws.store.block import StoreShape
from kvws.store.block_store import BlockStore
from kvws.store.directory import StoreDirectory
from kvws.store.manifest import write_manifest
from kvws.store.posix import PosixStorage
from kvws.tiers import write_behind
from kvws.tiers.codec import make_codec
from kvws.tiers.formats import PAYLOAD_FORMATS
from kvws.tiers.geometry import PayloadGeometry
from tests.plane.test_disk_tier import DiskRig, assert_placed, eventually
from tests.project.storage_document import (
    DOCUMENT,
    number,
    read_frames,
    read_manifest,
    read_rank,
    rows,
    section,
)
from tests.store.folders import IDENTITY, assert_refused, tree_hash
from tests.store.store_place import (
    OTHER_ROWS,
    SHAPE,
    Place,
    block,
    buffers,
    fill,
    reopened,
)

ROOT = Path(__file__).resolve().parents[2]


def promises() -> list[tuple[str, str, str]]:
    return re.findall(r"^\| (\d+) \| (.+) \| (.+) \|$", section("7. Promises"), re.M)


@cache
def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in tree.body if isinstance(node, kinds)}


def test_every_promise_names_tests_that_exist() -> None:
    found = promises()
    assert [int(row[0]) for row in found] == list(range(1, len(found) + 1)) and len(found) > 30
    for _, promise, cell in found:
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", cell)
        assert named, f"no test holds: {promise}"
        assert len(named) == cell.count("`") // 2, f"unreadable: {cell}"
        for file, function in named:
            assert (ROOT / file).is_file(), file
            assert function in functions(ROOT / file), f"{file} has no {function}"


def test_every_name_of_a_file_in_the_document_exists() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for name in re.findall(r"`([\w./-]+/[\w./-]+\.py)`", text):
        assert (ROOT / name).is_file() or (ROOT / "kvws" / name).is_file(), name


@pytest.mark.parametrize("row", rows("Constants", "constant"), ids=lambda row: row[0])
def test_every_constant_is_the_one_of_the_code(row: list[str]) -> None:
    module, _, attributes = row[2].strip("`").partition(":")
    value: Any = importlib.import_module(module)
    for attribute in attributes.split("."):
        value = getattr(value, attribute)
    text = row[1].strip("`")
    if not isinstance(value, str):
        text = bytes.fromhex(text) if isinstance(value, bytes) else number(text)
    assert value == text


def test_sizes_of_payloads_are_those_of_the_codecs() -> None:
    costs = re.findall(r"^\| (\w+) \| ([\d,]+) \| ([\d,]+) \|", section("5. Payloads"), re.M)
    assert [name for name, _, _ in costs] == list(PAYLOAD_FORMATS)
    smollm2 = PayloadGeometry(30, 3, 64, torch.float32)
    for name, payload_bytes, bytes_per_token in costs:
        codec = make_codec(name, smollm2, [unturned(64)] * 30)
        assert codec.payload_bytes == number(payload_bytes) == 32 * number(bytes_per_token)


def unturned(dim: int) -> RotaryTable:
    return RotaryTable(torch.ones(64, dim // 2), torch.zeros(64, dim // 2), interleaved=False)


def test_a_reader_that_knows_only_the_document_reads_a_rank(tmp_path: Path) -> None:
    place = Place(tmp_path)
    store = place.open()
    fill(store, range(11))
    fill(store, [3, 9], version=1)
    store.drop([0, 10])
    fill(store, [2**40, 30])
    store.close()
    versions = {n: int(n in (3, 9)) for n in (*range(1, 10), 2**40, 30)}
    assert_reads(place, versions, SHAPE)


def test_a_reader_that_knows_only_the_document_reads_a_rank_whose_rows_were_made_anew(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path)
    store = place.open()
    fill(store, range(11))
    store.close()
    store = reopened(place)
    fill(store, [3, 9], version=1)
    store.drop([0])
    store.close()
    assert_reads(place, {n: int(n in (3, 9)) for n in range(1, 11)}, OTHER_ROWS)


def assert_reads(place: Place, versions: dict[int, int], shape: StoreShape) -> None:
    """The document's reader finds these blocks, in these versions, with rows of this shape."""
    found = read_rank(place.path)
    assert found.keys() == versions.keys()
    for key, (record, payload, row) in found.items():
        expected = block(key, versions[key], shape)
        assert payload == expected.payload and row == expected.row
        assert record["page_hash"] == expected.page_hash
        assert record["first_position"] == expected.first_position


def test_a_reader_that_knows_only_the_document_reads_a_workspace_s_manifest(
    tmp_path: Path,
) -> None:
    with StoreDirectory.open(tmp_path / "store", PosixStorage(tmp_path)) as directory:
        path = directory.open_workspace("ü 會話", IDENTITY)
    content = read_manifest(path / "MANIFEST", "Workspace manifest")
    assert blake2b(content["name"].encode(), digest_size=16).hexdigest() == path.name
    compared = {row[0]: row[1] == "yes" for row in rows("Workspace manifest", "identity")}
    assert list(content["identity"]) == list(compared)
    for name, is_compared in compared.items():
        other = replace(IDENTITY, **{name: getattr(IDENTITY, name) * 2})
        assert bool(IDENTITY.differences(other)) == is_compared, name


def test_a_reader_that_knows_only_the_document_reads_a_session_log(tmp_path: Path) -> None:
    async def write() -> Workspace:
        workspace = Workspace("w")
        journal, _ = await SessionJournal.open(tmp_path / "session.log")
        workspace.journal = journal
        line: tuple[int, ...] = ()
        for letters in ("ab", "cd"):
            tokens = [ord(letter) << 20 for letter in letters for _ in range(32)]
            fresh = tuple(workspace.allocate(line, tokens))
            workspace.announce(fresh)
            line += fresh
            workspace.record(workspace.thread("main"), line, line[1:], fresh)
        await journal.close()
        return workspace

    workspace = asyncio.run(write())
    keys = {row[0] for row in rows("session.log", "key")}
    commits = list(read_frames((tmp_path / "session.log").read_bytes()))
    assert len(commits) == 4 and all(commit.keys() <= keys for commit in commits)
    parents: dict[int, int] = {}
    for commit in commits:
        for key in ("announced", "blocks"):
            numbers, before, tokens = (
                struct.unpack(f"<{len(part) // 4}I", part)
                for part in commit.get(key, (b"", b"", b""))
            )
            for n, block_number in enumerate(numbers):
                expected = workspace.block_tokens(block_number)
                assert tokens[32 * n : 32 * n + 32] == expected
            if key == "blocks":
                parents.update(zip(numbers, before, strict=True))
    assert parents == {0: 2**32 - 1, 1: 0, 2: 1, 3: 2}
    name, head, view, kept_last_view = commits[-1]["thread"]
    assert (name, head, struct.unpack("<3I", view), kept_last_view) == ("main", 3, (1, 2, 3), True)


def test_a_commit_has_the_keys_of_the_document_and_no_others() -> None:
    blocks = (BlockRecord(1, 0, (7,) * 32),)
    thread = ThreadRecord("main", 1, (1,), kept_last_view=True)
    step = StepRecord(StepReport("main"), 1, None)
    whole = Commit(blocks, blocks, blocks, thread, step, {}, 1, 1, 1)
    message = msgpack.unpackb(encode_commit(whole))
    assert list(message) == [row[0] for row in rows("session.log", "key")]


@pytest.mark.parametrize("format", ["fp8", "int8", "int4"])
def test_a_reader_that_knows_only_the_document_reads_quantised_payloads(format: str) -> None:
    heads, dim, layers = 2, 48, 3
    geometry = PayloadGeometry(layers, heads, dim, torch.float32)
    codec = make_codec(format, geometry, [unturned(dim)] * layers)
    payload = torch.randn((1, *geometry.shape), generator=torch.Generator().manual_seed(5))
    data = torch.empty(1, codec.payload_bytes, dtype=torch.uint8)
    codec.encode(payload, torch.tensor([-1]), data)
    expected = torch.empty_like(payload)
    codec.decode(data, expected)
    rest = data[0]

    def take(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        nonlocal rest
        size_bytes = dtype.itemsize * torch.Size(shape).numel()
        part, rest = rest[:size_bytes].clone().view(dtype).view(shape).float(), rest[size_bytes:]
        return part

    for layer in range(layers):
        for side in (0, 1):
            if format == "fp8":
                codes = take(torch.float8_e4m3fn, 32, heads, dim)
                got = take(torch.bfloat16, heads).unsqueeze(-1) * codes
            else:
                packed = take(torch.uint8, 16 if format == "int4" else 32, heads, dim)
                codes = packed
                if format == "int4":
                    codes = torch.cat([packed % 16, packed.div(16, rounding_mode="floor")])
                run = 16 if format == "int4" else dim  # gcd(48, 32)
                shape = (32, heads, dim // run) if side else (heads, dim)
                step, low = take(torch.bfloat16, *shape), take(torch.float16, *shape)
                if side:
                    step, low = (part.repeat_interleave(run, -1) for part in (step, low))
                got = low + step * codes
            assert torch.allclose(got, expected[0, side, layer], atol=1e-6)
    assert (rest == 0).all()


# --- promises that need a test of their own


def test_a_budget_of_zero_is_refused_and_the_store_untouched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: Any) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr(launch, "running_engine", started)
    with StoreDirectory.open(tmp_path / "store", PosixStorage(tmp_path)) as directory:
        directory.open_workspace("w", IDENTITY)
    before = tree_hash(tmp_path)
    trace = ROOT / "traces" / "step-summary.traj.json"
    for size in ("0", "-1", "0GiB", "none"):
        arguments = ["replay", str(trace), "--disk-dir", str(tmp_path / "store")]
        result = CliRunner().invoke(main, [*arguments, f"--disk-gb={size}"])
        assert result.exit_code == 1 and "disk_gb" in result.output, result.output
        assert "hint: " in result.output and "Traceback" not in result.output
        assert tree_hash(tmp_path) == before


def test_opening_reads_no_payload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(tmp_path)
    store = place.open()
    fill(store, range(9))
    store.close()

    def opened(*_: Any, **__: Any) -> None:
        raise AssertionError("a file of payloads was opened")

    monkeypatch.setattr(PosixStorage, "open_segment", opened)
    store = place.open()
    assert len(store.blocks()) == 9 and len(dict(store.read_rows())) == 9
    with pytest.raises(AssertionError, match="payloads"):
        store.read([0], buffers(1))
    store.close()


def test_a_rank_of_a_newer_format_is_refused_and_untouched(tmp_path: Path) -> None:
    place = Place(tmp_path)
    store = place.open()
    fill(store, range(3))
    store.close()
    path = place.path / "MANIFEST"
    content = read_manifest(path, "Rank manifest")
    write_manifest(place.storage, path, content | {"version": content["version"] + 1})
    assert_refused(StoreFormatError, tmp_path, place.open, "version 3", str(path))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DiskRig]:
    torch.manual_seed(23)
    rig = DiskRig(tmp_path)
    yield rig
    rig.plane.close()


def test_a_block_that_cannot_be_read_is_missing_and_is_put_again(
    rig: DiskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    originals = rig.write_pages(0, [0, 1], at=0)
    rig.until_saved()
    rig.restart()

    def failing(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(BlockStore, "read", failing)
    step = rig.open()
    (name,) = rig.names(1, step)
    assert rig.plane.promise(step, [(name, whole_block(0))]) == [0]
    assert rig.plane.queue_load(step, [name], [20]) is None
    rig.close(step, [])
    monkeypatch.undo()
    rig.write(0, [0])
    rig.until_saved()
    rig.restart()
    rig.view([whole_block(0), whole_block(1)], [20, 21])
    for index in range(2):
        assert_placed(rig, 20 + index, originals[index])


def test_a_full_budget_pauses_the_disk_until_blocks_are_dropped(
    rig: DiskRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(write_behind, "FIRST_RETRY_S", 0.02)
    rig.write_pages(0, [0, 1, 2, 3], at=0)
    rig.until_saved()
    rig.disk.budget.capacity_bytes = rig.disk.budget.used_bytes  # one segment, 64 blocks
    for first in range(4, 64, 4):
        rig.write_pages(first, [0, 1, 2, 3], at=first % 32)
        rig.until_saved()
    originals = rig.write_pages(64, [4, 5], at=0)
    eventually(lambda: rig.plane.stats()["disk_paused"] == 1)
    rig.view([whole_block(7), whole_block(65)], [20, 21])
    assert sum("paused" in record.message for record in caplog.records) == 1
    assert "--disk-gb" in caplog.text
    rig.plane.forget("w", [0, 1])
    rig.until_saved()
    assert rig.plane.stats()["disk_paused"] == 0
    rig.restart()
    assert rig.held == list(range(2, 66))
    rig.view([whole_block(64), whole_block(65)], [20, 21])
    for index, original in enumerate(originals):
        assert_placed(rig, 20 + index, original)
