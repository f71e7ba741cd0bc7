"""`kvws sessions`: list, delete, check and tidy up, with or without a server beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvws.cli.main import main
from kvws.store.block import NewBlock, StoreShape
from kvws.store.block_store import BlockStore
from kvws.store.directory import StoreDirectory
from kvws.store.identity import ModelIdentity
from kvws.store.listing import folder_name
from kvws.store.maintenance import UnlimitedSpace
from kvws.store.manifest import write_manifest
from kvws.store.posix import PosixStorage
from kvws.store.record import encode_frame, pack
from kvws.store.segment import aligned_buffer

SHAPE = StoreShape(payload_bytes=4096, row_bytes=64, payload_format="exact", row_format="f16")
SEGMENT_BLOCKS = 4
RANKS = 2
IDENTITY = ModelIdentity(
    model="smollm2", weights="aa", rotary="bb", dtype="float32", layers=2, kv_heads=2,
    head_dim=8, ranks=RANKS, block_tokens=32,
)  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with a session of 6 blocks, and one of none."""
    root = tmp_path / "store"
    storage = PosixStorage(root)
    with StoreDirectory.open(root, storage) as directory:
        path = directory.open_workspace("fix-login", IDENTITY)
        for rank in range(RANKS):
            with closing(open_rank(path, rank)) as store:
                store.put([block(number) for number in range(7)])
                store.drop([3])
        log = encode_frame(pack([1, 2, 3]), 0)
        (path / "session.log").write_bytes(log + encode_frame(pack([4]), len(log)))
        directory.open_workspace("empty [/red]", IDENTITY)
    return root


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings but those of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("KVWS_DISK_DIR", raising=False)


def open_rank(workspace: Path, rank: int) -> BlockStore:
    return BlockStore.open(
        PosixStorage(workspace), workspace / f"rank-{rank}", SHAPE, UnlimitedSpace(), rank=rank,
        segment_blocks=SEGMENT_BLOCKS,
    )  # fmt: skip


def block(number: int) -> NewBlock:
    payload = aligned_buffer(SHAPE.payload_bytes)
    payload[:] = bytes([number + 1]) * SHAPE.payload_bytes
    row = memoryview(bytes([number + 101]) * SHAPE.row_bytes)
    return NewBlock(number, bytes(32), 0, payload, row)


def session(root: Path, name: str = "fix-login") -> Path:
    return root / folder_name(name)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def sessions(root: Path, *arguments: str, answer: str | None = None) -> Result:
    command, *rest = arguments
    line = ["sessions", command, "--disk-dir", str(root), *rest]
    return CliRunner().invoke(main, line, input=answer)


def listed(root: Path) -> dict[str, dict[str, Any]]:
    result = sessions(root, "ls", "--json")
    assert result.exit_code == 0, result.output
    return {entry["name"]: entry for entry in json.loads(result.stdout)}


def checked(root: Path, *names: str) -> tuple[dict[str, dict[str, Any]], int]:
    result = sessions(root, "verify", "--json", *names)
    return {entry["name"]: entry for entry in json.loads(result.stdout)}, result.exit_code


def assert_one_clear_line(result: Result, *words: str) -> None:
    assert result.exit_code == 1, result.output
    lines = [line for line in result.output.splitlines() if line.strip()]
    assert lines[0].startswith("kvws: ")
    assert lines[1].startswith("hint: ")
    assert len(lines) == 2, result.output
    for word in words:
        assert word in result.output


# --- which directory


def test_without_a_directory_it_says_how_to_name_one() -> None:
    result = CliRunner().invoke(main, ["sessions", "ls"])
    assert_one_clear_line(result, "--disk-dir", "KVWS_DISK_DIR")


def test_the_directory_may_come_from_the_environment(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVWS_DISK_DIR", str(root))
    result = CliRunner().invoke(main, ["sessions", "ls"])
    assert result.exit_code == 0
    assert "fix-login" in result.output


@pytest.mark.parametrize("command", [["ls"], ["rm", "x", "--yes"], ["verify"], ["gc"]])
def test_no_command_makes_or_takes_over_a_directory(tmp_path: Path, command: list[str]) -> None:
    assert_one_clear_line(sessions(tmp_path / "none", *command), "none")
    foreign = tmp_path / "home"
    foreign.mkdir()
    (foreign / "thesis.tex").touch()
    assert_one_clear_line(sessions(foreign, *command), "thesis.tex")
    assert [path.name for path in foreign.iterdir()] == ["thesis.tex"]
    assert not (tmp_path / "none").exists()


# --- ls


def test_ls_counts_blocks_and_tokens(root: Path) -> None:
    entries = listed(root)
    assert entries.keys() == {"fix-login", "empty [/red]"}
    entry = entries["fix-login"]
    assert (entry["blocks"], entry["tokens"], entry["state"]) == (6, 192, "ok")
    assert entry["model"] == IDENTITY.as_dict()
    files = [path for path in session(root).rglob("*") if path.is_file()]
    assert entry["disk_bytes"] >= sum(path.stat().st_blocks * 512 for path in files)
    assert entries["empty [/red]"]["blocks"] == 0


def test_ls_prints_a_table_with_names_as_they_are(root: Path) -> None:
    result = sessions(root, "ls")
    assert result.exit_code == 0
    header, *rows = result.output.splitlines()
    assert header.split() == ["name", "blocks", "tokens", "size", "model", "modified", "state"]
    assert any(row.strip().startswith("empty [/red]") for row in rows)
    assert any(row.strip().startswith("fix-login") and " 192 " in row for row in rows)


def test_ls_works_beside_a_server_and_changes_nothing(root: Path) -> None:
    index = session(root) / "rank-0" / "index.log"
    with StoreDirectory.open(root, PosixStorage(root)):
        with index.open("ab") as file:
            file.write(b"kvw\x01 a frame that the server is just writing")
        before = index.read_bytes()
        assert listed(root)["fix-login"]["blocks"] == 6
        assert index.read_bytes() == before


def test_ls_names_what_is_wrong_with_a_session(root: Path) -> None:
    flip(session(root) / "MANIFEST", 40)
    newer = {"kind": "kvws-workspace", "version": 2}
    write_manifest(PosixStorage(root), session(root, "empty [/red]") / "MANIFEST", newer)
    result = sessions(root, "ls")
    assert result.exit_code == 0
    assert "damaged" in result.stdout and "other format" in result.stdout
    assert "version 2" in result.stderr
    states = {entry["state"]: entry for entry in listed(root).values()}
    assert states.keys() == {"damaged", "other format"}
    assert states["damaged"]["blocks"] is None


@pytest.mark.parametrize("size_bytes", [None, 0, 1 << 40])
def test_ls_outlives_any_index(root: Path, size_bytes: int | None) -> None:
    index = session(root) / "rank-0" / "index.log"
    if size_bytes is None:
        index.unlink()
        index.mkdir()
    else:
        with index.open("r+b") as file:
            file.truncate(size_bytes)
    assert listed(root)["fix-login"]["blocks"] == (0 if size_bytes == 0 else None)


# --- rm


def test_rm_deletes_after_a_yes(root: Path) -> None:
    result = sessions(root, "rm", "fix-login", answer="y\n")
    assert result.exit_code == 0
    assert "fix-login" in result.output
    assert listed(root).keys() == {"empty [/red]"}
    assert not session(root).exists()


def test_rm_keeps_all_after_a_no(root: Path) -> None:
    assert sessions(root, "rm", "fix-login", answer="n\n").exit_code == 1
    assert "fix-login" in listed(root)


def test_rm_takes_several_names_and_digits_of_a_folder(root: Path) -> None:
    digits = session(root).name[:8]
    result = sessions(root, "rm", "--yes", "empty [/red]", digits, "fix-login")
    assert result.exit_code == 0, result.output
    assert listed(root) == {}


def test_rm_of_an_unknown_name_deletes_nothing(root: Path) -> None:
    result = sessions(root, "rm", "--yes", "empty [/red]", "fix-logn")
    assert_one_clear_line(result, "fix-logn", "'fix-login'")
    assert len(listed(root)) == 2


@pytest.mark.parametrize("command", [["rm", "fix-login", "--yes"], ["verify"], ["gc"]])
def test_what_changes_files_is_refused_beside_a_server(root: Path, command: list[str]) -> None:
    with StoreDirectory.open(root, PosixStorage(root)):
        assert_one_clear_line(sessions(root, *command), "in use by process", "stop it")
    assert len(listed(root)) == 2


def test_rm_deletes_a_damaged_session_by_its_folder(root: Path) -> None:
    flip(session(root) / "MANIFEST", 40)
    assert sessions(root, "rm", "--yes", session(root).name).exit_code == 0
    assert not session(root).exists()


# --- verify


def test_verify_reads_every_block_of_every_rank(root: Path) -> None:
    checks, exit_code = checked(root)
    assert exit_code == 0
    assert checks["fix-login"]["blocks"] == 6 * RANKS
    assert not any(check["damaged"] for check in checks.values())
    assert checked(root, "empty [/red]")[0].keys() == {"empty [/red]"}


@pytest.mark.parametrize("offset", [0, 4095])
def test_verify_finds_a_flipped_bit_in_a_payload(root: Path, offset: int) -> None:
    flip(session(root) / "rank-1" / "segment-000000.kv", offset)
    checks, exit_code = checked(root)
    assert exit_code == 1
    assert checks["fix-login"]["corrupt_blocks"] == [[1, 0]]
    assert not checks["empty [/red]"]["damaged"]
    result = sessions(root, "verify")
    assert result.exit_code == 1
    assert "1 damaged block," in result.stderr and "computed again" in result.stderr


def test_verify_finds_a_flipped_bit_in_a_row(root: Path) -> None:
    flip(session(root) / "rank-0" / "rows-000000.mk", SHAPE.row_bytes)
    checks, exit_code = checked(root)
    assert exit_code == 1
    assert checks["fix-login"]["damaged_rows"] == [[0, 1]]


def test_verify_finds_blocks_whose_segment_is_gone(root: Path) -> None:
    (session(root) / "rank-0" / "segment-000001.kv").unlink()
    checks, exit_code = checked(root)
    assert exit_code == 1
    assert checks["fix-login"]["lost_blocks"] == 3


@pytest.mark.parametrize("log", ["session.log", "rank-0/index.log"])
def test_verify_finds_damage_within_a_log(root: Path, log: str) -> None:
    flip(session(root) / log, 24)
    checks, exit_code = checked(root)
    assert exit_code == 1
    assert checks["fix-login"]["damaged_log_bytes"] > 0
    assert "damaged bytes" in sessions(root, "verify").stderr


def test_a_torn_tail_is_no_damage(root: Path) -> None:
    for log in ("session.log", "rank-0/index.log"):
        with (session(root) / log).open("ab") as file:
            file.write(b"kvw\x01 half a fr")
    assert checked(root)[1] == 0


@pytest.mark.parametrize("rank", range(RANKS))
def test_verify_misses_a_rank(root: Path, rank: int) -> None:
    (session(root) / f"rank-{rank}").rename(root / "elsewhere")
    checks, exit_code = checked(root)
    assert exit_code == 1
    assert checks["fix-login"]["problems"] == [f"the folder of rank {rank} is missing"]


def ruin_manifest(rank: Path) -> None:
    flip(rank / "MANIFEST", 40)


def lose_manifest(rank: Path) -> None:
    (rank / "MANIFEST").unlink()


def swap_with_a_link(rank: Path) -> None:
    (rank / "thesis.tmp").touch()
    rank.rename(rank.with_name("moved"))
    rank.symlink_to("moved")


def open_to_all(rank: Path) -> None:
    rank.chmod(0o777)


@pytest.mark.parametrize("ruin", [ruin_manifest, lose_manifest, swap_with_a_link, open_to_all])
def test_a_rank_that_is_not_what_it_was_is_a_problem_and_left_as_it_is(
    root: Path, ruin: Any
) -> None:
    ruin(session(root) / "rank-0")
    (session(root) / "rank-1").rename(root / "aside")
    files = {path: path.read_bytes() for path in root.rglob("*/*") if path.is_file()}
    checks, exit_code = checked(root)
    assert exit_code == 1
    assert any("rank-0" in problem for problem in checks["fix-login"]["problems"])
    assert "rank-0" in sessions(root, "gc").stderr
    assert {path: path.read_bytes() for path in files} == files


def test_a_rank_that_died_before_its_first_block_is_no_problem(root: Path) -> None:
    for rank in range(RANKS):
        folder = session(root, "empty [/red]") / f"rank-{rank}"
        folder.mkdir(mode=0o700)
        (folder / "MANIFEST.tmp").write_bytes(b"half")
    checks, exit_code = checked(root)
    assert exit_code == 0
    assert checks["empty [/red]"]["problems"] == []
    assert sessions(root, "gc").exit_code == 0


# --- gc


@pytest.fixture
def half_removed(root: Path) -> Iterator[Path]:
    path = root / f".removed-{folder_name('old')}"
    path.mkdir()
    (path / "segment-000000.kv").write_bytes(bytes(1 << 20))
    yield path


def test_gc_finishes_deletions_and_frees_segments_without_blocks(
    root: Path, half_removed: Path
) -> None:
    for rank in range(RANKS):
        with closing(open_rank(session(root), rank)) as store:
            store.drop([4, 5, 6])
    (session(root) / "MANIFEST.tmp").write_bytes(b"half")
    result = sessions(root, "gc")
    assert result.exit_code == 0, result.output
    assert "1 interrupted deletion, 0 unfinished sessions, 1 temporary file\n" in result.output
    assert not half_removed.exists()
    names = {path.name for path in session(root).rglob("*")}
    assert "segment-000000.kv" in names
    assert "segment-000001.kv" not in names and "MANIFEST.tmp" not in names
    checks, exit_code = checked(root)
    assert (checks["fix-login"]["blocks"], exit_code) == (3 * RANKS, 0)


def test_gc_leaves_other_things_alone(root: Path) -> None:
    (root / "README").write_text("ours")
    (root / ".removed-notes").write_text("mine")
    (session(root) / "notes.txt").write_text("mine")
    assert sessions(root, "gc").exit_code == 0
    assert (root / "README").exists() and (root / ".removed-notes").exists()
    assert (session(root) / "notes.txt").exists()
