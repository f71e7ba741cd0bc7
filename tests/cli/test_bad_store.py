"""A disk tier that cannot be used: one clear line before an engine starts, files untouched."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvws.engine import launch
from kvws.store.directory import StoreDirectory
from kvws.store.posix import PosixStorage
from tests.cli.test_bad_input import assert_one_clear_line, replay, trace

__all__ = ["trace"]


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr(launch, "_engine_processes", started)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "store"
    StoreDirectory.open(root, PosixStorage(root)).close()
    yield root
    root.chmod(0o700)


def test_a_folder_that_is_somebody_else_s(trace: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "home"
    foreign.mkdir(mode=0o700)
    (foreign / "thesis.tex").write_text("years of work")
    assert_one_clear_line(replay(trace, "--disk-dir", foreign), "empty folder")
    assert [path.name for path in foreign.iterdir()] == ["thesis.tex"]


def test_a_folder_in_use(trace: Path, store: Path) -> None:
    with StoreDirectory.open(store, PosixStorage(store)):
        result = replay(trace, "--disk-dir", store)
    assert_one_clear_line(result, str(os.getpid()), "--disk-dir")


def test_a_symbolic_link(trace: Path, store: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(store)
    assert_one_clear_line(replay(trace, "--disk-dir", link), "symbolic link", str(store))


def test_a_folder_that_others_can_write_to(trace: Path, store: Path) -> None:
    store.chmod(0o777)
    assert_one_clear_line(replay(trace, "--disk-dir", store), "chmod go-w")


def test_a_read_only_folder(trace: Path, store: Path) -> None:
    store.chmod(0o500)
    assert_one_clear_line(replay(trace, "--disk-dir", store), "chmod u+rwx")


def test_a_file(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    assert_one_clear_line(replay(trace, "--disk-dir", path), "folder")
