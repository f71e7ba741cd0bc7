"""Workspaces of a store directory: made, found, listed, and refused when they are not ours."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvws.errors import ConfigError, KvwsError, OtherModel, StoreFormatError, UnsafeStore
from kvws.store.directory import StoreDirectory
from kvws.store.listing import WorkspaceState, folder_name
from kvws.store.manifest import write_manifest
from kvws.store.posix import PosixStorage
from tests.store.folders import IDENTITY, assert_refused, tree_hash


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    return PosixStorage(tmp_path)


@pytest.fixture
def directory(root: Path, storage: PosixStorage) -> Iterator[StoreDirectory]:
    with StoreDirectory.open(root, storage) as opened:
        yield opened


def test_a_workspace_is_found_again(root: Path, storage: PosixStorage) -> None:
    with StoreDirectory.open(root, storage) as directory:
        path = directory.open_workspace("agent-1", IDENTITY)
    with StoreDirectory.open(root, storage) as directory:
        assert directory.open_workspace("agent-1", IDENTITY) == path
        assert directory.open_workspace("agent-2", IDENTITY) != path
        entries = {entry.name: entry for entry in directory.list_workspaces()}
    assert entries.keys() == {"agent-1", "agent-2"}
    assert entries["agent-1"].identity == IDENTITY
    assert entries["agent-1"].path == path
    assert path.stat().st_mode & 0o777 == 0o700
    assert (path / "MANIFEST").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["../../etc", "/etc/passwd", ".", "a/b", "LOCK", "ü 會話"])
def test_a_name_never_becomes_a_path(directory: StoreDirectory, name: str) -> None:
    path = directory.open_workspace(name, IDENTITY)
    assert path.parent == directory.root
    assert path.name == folder_name(name)
    assert [entry.name for entry in directory.list_workspaces()] == [name]


@pytest.mark.parametrize("name", ["", "x" * 513, "two\nlines", "\x1b[2J", "\ud800"])
def test_a_name_that_cannot_be_shown_is_refused(directory: StoreDirectory, name: str) -> None:
    assert_refused(
        ConfigError, directory.root, lambda: directory.open_workspace(name, IDENTITY), "printable"
    )


def test_the_name_of_the_model_is_not_compared(directory: StoreDirectory) -> None:
    directory.open_workspace("w", IDENTITY)
    directory.open_workspace("w", replace(IDENTITY, model="/models/smollm2"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weights": "cc" * 16}, "other weights"),
        ({"rotary": "cc" * 16}, "other rotary tables"),
        ({"dtype": "float16"}, "KV in float32, the engine has float16"),
        ({"layers": 4}, "2 layers, the engine has 4"),
        ({"kv_heads": 1}, "3 KV heads, the engine has 1"),
        ({"head_dim": 128}, "64 values per head, the engine has 128"),
        ({"ranks": 2}, "1 rank, the engine has 2"),
        ({"block_tokens": 16}, "32 tokens per block, the engine has 16"),
        ({"ranks": 2, "layers": 4}, "2 layers, the engine has 4; 1 rank, the engine has 2"),
    ],
)
def test_a_workspace_of_another_model_or_layout_is_refused(
    directory: StoreDirectory, change: dict[str, str | int], words: str
) -> None:
    path = directory.open_workspace("w", IDENTITY)
    other = replace(IDENTITY, **change)
    assert_refused(
        OtherModel, directory.root, lambda: directory.open_workspace("w", other), words, path.name
    )


def test_a_workspace_of_a_newer_format_is_refused_and_listed(
    directory: StoreDirectory, storage: PosixStorage
) -> None:
    path = directory.open_workspace("w", IDENTITY)
    write_manifest(storage, path / "MANIFEST", {"kind": "kvws-workspace", "version": 2})
    assert_refused(
        StoreFormatError, directory.root, lambda: directory.open_workspace("w", IDENTITY), "2"
    )
    (entry,) = directory.list_workspaces()
    assert entry.state is WorkspaceState.OTHER_FORMAT
    assert (entry.name, entry.identity) == (path.name, None)


def bad_manifests() -> dict[str, Callable[[Path], None]]:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    def link(path: Path) -> None:
        path.rename(path.with_name("elsewhere"))
        path.symlink_to("elsewhere")

    def fifo(path: Path) -> None:
        path.unlink()
        os.mkfifo(path)

    def folder(path: Path) -> None:
        path.unlink()
        path.mkdir()

    def missing(path: Path) -> None:
        path.unlink()
        path.with_name("session.log").touch()

    return {
        "flipped bit": flip,
        "cut short": lambda path: os.truncate(path, path.stat().st_size - 1),
        "empty": lambda path: os.truncate(path, 0),
        "longer": lambda path: os.truncate(path, path.stat().st_size + 1),
        "text": lambda path: path.write_text("workspace: w") and None,
        "huge": lambda path: os.truncate(path, 1 << 40),
        "missing": missing,
        "link": link,
        "pipe": fifo,
        "folder": folder,
    }


@pytest.mark.parametrize("damage", bad_manifests().values(), ids=bad_manifests())
def test_a_damaged_workspace_is_refused_and_listed_beside_the_others(
    directory: StoreDirectory, damage: Callable[[Path], None]
) -> None:
    directory.open_workspace("good", IDENTITY)
    path = directory.open_workspace("w", IDENTITY)
    damage(path / "MANIFEST")
    with pytest.raises(KvwsError) as raised:
        directory.open_workspace("w", IDENTITY)
    assert raised.value.hint
    entries = {entry.name: entry for entry in directory.list_workspaces()}
    assert entries["good"].state is WorkspaceState.OK
    assert entries[path.name].state is WorkspaceState.DAMAGED
    assert entries[path.name].problem
    report = directory.collect_garbage()
    assert [name for name, _ in report.problems] == [path.name]
    assert path.is_dir()


@pytest.mark.parametrize(
    "change",
    [
        {"name": None},
        {"name": "another"},
        {"name": "\x1b[2J"},
        {"identity": None},
        {"identity": {}},
        {"identity": IDENTITY.as_dict() | {"colour": "red"}},
        {"identity": IDENTITY.as_dict() | {"layers": "2"}},
        {"identity": IDENTITY.as_dict() | {"layers": True}},
        {"identity": IDENTITY.as_dict() | {"ranks": 0}},
        {"identity": IDENTITY.as_dict() | {"kv_heads": 1 << 40}},
        {"identity": IDENTITY.as_dict() | {"dtype": 16}},
        {"identity": {1: 2}},
    ],
)
def test_a_manifest_with_other_content_is_refused(
    directory: StoreDirectory, storage: PosixStorage, change: dict[str, object]
) -> None:
    path = directory.open_workspace("w", IDENTITY)
    content = {
        "kind": "kvws-workspace", "version": 1, "name": "w", "identity": IDENTITY.as_dict(),
    }  # fmt: skip
    write_manifest(storage, path / "MANIFEST", content)
    directory.open_workspace("w", IDENTITY)
    write_manifest(storage, path / "MANIFEST", content | change)
    before = tree_hash(directory.root)
    with pytest.raises(StoreFormatError):
        directory.open_workspace("w", IDENTITY)
    assert tree_hash(directory.root) == before
    assert directory.list_workspaces()[0].problem


def test_a_stored_name_that_would_take_over_a_terminal_is_not_shown(
    directory: StoreDirectory, storage: PosixStorage
) -> None:
    name = "\x1b[2J"
    path = directory.root / folder_name(name)
    path.mkdir(mode=0o700)
    content = {
        "kind": "kvws-workspace", "version": 1, "name": name, "identity": IDENTITY.as_dict(),
    }  # fmt: skip
    write_manifest(storage, path / "MANIFEST", content)
    (entry,) = directory.list_workspaces()
    assert entry.problem
    assert entry.name == path.name


def test_a_copied_workspace_is_refused(directory: StoreDirectory) -> None:
    path = directory.open_workspace("w", IDENTITY)
    copy = directory.workspace_path("x")
    copy.mkdir(mode=0o700)
    (copy / "MANIFEST").write_bytes((path / "MANIFEST").read_bytes())
    assert_refused(
        StoreFormatError, directory.root, lambda: directory.open_workspace("x", IDENTITY)
    )


def test_a_workspace_folder_that_is_a_link_or_open_to_others_is_refused(
    directory: StoreDirectory, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    directory.workspace_path("link").symlink_to(elsewhere)
    directory.workspace_path("open").mkdir()
    directory.workspace_path("open").chmod(0o777)
    for name in ("link", "open"):
        assert_refused(
            UnsafeStore, tmp_path, lambda name=name: directory.open_workspace(name, IDENTITY)
        )
    assert all(entry.problem for entry in directory.list_workspaces())
    directory.remove(folder_name("link"))
    assert elsewhere.is_dir()


# --- finding one


def test_a_workspace_is_named_by_its_name_or_the_first_digits_of_its_folder(
    directory: StoreDirectory,
) -> None:
    for name in ("fix-login", "fix-logout", folder_name("fix-login")[:6]):
        directory.open_workspace(name, IDENTITY)
    assert directory.remove(folder_name("fix-login")[:6]).path.name != folder_name("fix-login")
    assert directory.remove(folder_name("fix-login")[:6]).name == "fix-login"
    with pytest.raises(ConfigError, match="did you mean 'fix-logout'"):
        directory.remove("fix-logot")
    with pytest.raises(ConfigError, match="sessions ls"):
        directory.remove("")
    with pytest.raises(ConfigError, match="there is no workspace"):
        directory.remove(folder_name("fix-logout")[:3])
    assert [entry.name for entry in directory.list_workspaces()] == ["fix-logout"]


def test_digits_that_begin_several_folders_are_refused(directory: StoreDirectory) -> None:
    for digits in ("0", "1"):
        (directory.root / ("abcd" + digits * 28)).mkdir()
    assert_refused(
        ConfigError, directory.root, lambda: directory.remove("abcd"), "several", "abcd0000"
    )


def test_the_listing_tells_disk_space_and_the_last_write(directory: StoreDirectory) -> None:
    old = directory.open_workspace("old", IDENTITY)
    new = directory.open_workspace("new", IDENTITY)
    (old / "session.log").write_bytes(bytes(1 << 20))
    for path in (old, *old.iterdir()):
        os.utime(path, (1000, 1000))
    first, second = directory.list_workspaces()
    assert (first.path, second.path) == (new, old)
    assert second.disk_bytes >= 1 << 20 > first.disk_bytes
    assert second.modified_s == 1000


def test_disk_space_is_not_counted_through_links(
    directory: StoreDirectory, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "film").write_bytes(bytes(1 << 20))
    path = directory.open_workspace("w", IDENTITY)
    (path / "link").symlink_to(outside)
    (path / "loop").symlink_to(path)
    (entry,) = directory.list_workspaces()
    assert entry.disk_bytes < 1 << 20
