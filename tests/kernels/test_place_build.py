"""The native library: built once, kept in the user's cache, never replaced in silence."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvws.errors import ConfigError
from kvws.kernels.place import build, prepare
from tests.kernels.placing import (
    PAYLOADS,
    Case,
    assert_close,
    assert_every_half_is_right,
    each_case,
    forget,
    needs_compiler,
)


@pytest.fixture
def new_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    yield tmp_path / "kvws" / "native"
    forget()


@needs_compiler
def test_a_compiler_makes_native_the_choice_and_the_log_says_so_once(
    new_process: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kvws.kernels"):
        prepare()
        prepare()
        Case(0, torch.float32).place("auto", None)
    assert [record.message for record in caplog.records] == [
        "blocks are placed by the native implementation"
    ]
    (library,) = new_process.iterdir()
    assert library.suffix == ".so" and stat.S_IMODE(new_process.stat().st_mode) == 0o700


@pytest.mark.parametrize("variable", ["no-such-compiler -m64", "'never closed", "false"])
def test_without_a_compiler_the_reference_serves_and_the_log_says_why(
    variable: str,
    new_process: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CC", variable)
    case = Case(0, torch.float32)
    with caplog.at_level(logging.INFO, "kvws.kernels"):
        got = case.place("auto", case.rotation)
        case.place("auto", case.rotation)
    assert torch.equal(got, case.place("reference", case.rotation))
    (line,) = [record.message for record in caplog.records]
    assert "by the reference implementation" in line and "ompiler" in line
    with pytest.raises(ConfigError, match="compiler") as refused:
        case.place("native", case.rotation)
    assert "let CC name a C compiler" in refused.value.hint


@needs_compiler
def test_a_compiler_that_cannot_compile_it_says_why(
    new_process: Path, tmp_path: Path
) -> None:
    source = tmp_path / "wrong.c"
    source.write_text("this is not C")
    with pytest.raises(ConfigError, match=r"(?s)the C compiler failed: .*wrong\.c.*error"):
        build.load_library(source, new_process, build.find_compiler())
    assert list(new_process.iterdir()) == []


@needs_compiler
def test_a_cached_library_needs_no_compiler(
    new_process: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare()
    forget()
    monkeypatch.setenv("CC", "no-such-compiler")
    case = Case(0, torch.float32)
    got = case.place("native", case.rotation)
    torch.testing.assert_close(got, case.place("reference", case.rotation))


ANSWER = "int answer(void) {{ return {}; }}"


def answer(folder: Path, value: int = 42) -> ctypes.CDLL:
    source = folder.parent / "answer.c"
    if not source.exists() or source.read_text() != ANSWER.format(value):
        source.write_text(ANSWER.format(value))
    return build.load_library(source, folder, build.find_compiler())


@needs_compiler
def test_another_source_or_compiler_has_a_library_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "native"
    assert (answer(folder, 1).answer(), answer(folder, 2).answer()) == (1, 2)
    monkeypatch.setattr(build, "_version", lambda compiler: b"another one")
    answer(folder, 2)
    assert len(list(folder.iterdir())) == 3


@needs_compiler
@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "not a library"])
def test_a_damaged_library_is_built_again(damage: str, tmp_path: Path) -> None:
    answer(tmp_path / "intact")
    (intact,) = (tmp_path / "intact").iterdir()
    content = intact.read_bytes()
    middle = len(content) // 2
    folder = tmp_path / "damaged"
    folder.mkdir(mode=0o700)
    (folder / intact.name).write_bytes(
        {
            "empty": b"",
            "cut": content[:middle],
            "flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
            "not a library": b"text" + build._digest(b"text"),
        }[damage]
    )
    assert answer(folder).answer() == 42
    assert len((folder / intact.name).read_bytes()) == len(content)


def build_beside_others(folder: Path, together: Any) -> None:
    together.wait(60)
    sys.exit(0 if answer(folder).answer() == 42 else 1)


@needs_compiler
def test_processes_that_build_at_once_all_get_a_library(tmp_path: Path) -> None:
    forked = multiprocessing.get_context("fork")
    together = forked.Barrier(4)
    (tmp_path / "answer.c").write_text(ANSWER.format(42))
    arguments = (tmp_path / "native", together)
    builders = [forked.Process(target=build_beside_others, args=arguments) for _ in range(4)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join(60)
    assert [builder.exitcode for builder in builders] == [0, 0, 0, 0]
    assert [path.suffix for path in (tmp_path / "native").iterdir()] == [".so"]


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "native"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="not a folder that you alone can write to"):
        answer(folder)
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="not a folder that you alone can write to"):
        answer(folder)


@needs_compiler
def test_what_other_processors_compile_is_right_as_well(
    new_process: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No AVX, no conversions in hardware, no fused multiply-add."""
    monkeypatch.setattr(build, "FLAGS", ("-std=c99", "-O2", "-fPIC", "-shared"))
    for interleaved in (False, True):
        for dtype in PAYLOADS:
            for note, case in each_case(dtype, interleaved):
                assert_close(case.place("native", case.rotation)[case.pages], case, note)
        assert_every_half_is_right(torch.float16, interleaved)
