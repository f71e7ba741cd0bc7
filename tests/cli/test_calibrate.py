"""`kvws calibrate`: a profile that recall finds by itself, or one clear line and a hint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvws.cli.main import main
from kvws.models.profiles import find_profile, load_profile
from tests.engine.tiny import tiny_model

Calibrate = Callable[..., Result]


@pytest.fixture(scope="module")
def tiny(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(smollm2, tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def tiny_copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


@pytest.fixture
def calibrate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calibrate:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(main, ["calibrate", *map(str, arguments)])

    return run


def refused(result: Result) -> str:
    assert result.exit_code == 1, result.output
    assert "hint:" in result.output and "Traceback" not in result.output
    return result.output


def test_a_models_profile_is_written_and_found_by_itself(
    calibrate: Calibrate, tiny: Path, tmp_path: Path
) -> None:
    assert find_profile(tiny) is None
    result = calibrate("--model", tiny, "--histories", 2)
    assert result.exit_code == 0, result.output
    found = find_profile(tiny)
    assert found is not None
    profile, path = found
    assert (profile.layers, profile.query_heads, profile.kv_heads) == (3, 4, 2)
    assert 1 <= len(profile.content_heads) <= 8 and profile.rotated_layers == (0, 2)
    assert "verbatim" in result.output and "paraphrased" in result.output
    assert path.is_relative_to(tmp_path / "config")
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # nothing half written


def test_out_names_the_file(
    calibrate: Calibrate, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvws.eval.calibrate.calibrate", instantly)
    out = tmp_path / "new folder" / "profile.json"
    result = calibrate("--model", tiny, "--out", out)
    assert result.exit_code == 0, result.output
    assert load_profile(out, tiny).content_heads == ((2, 3), (1, 0))
    assert find_profile(tiny) is None


def instantly(reader: object, renderer: object, model: str, **_: object) -> object:
    """A calibration that took no time."""
    from kvws.eval.calibrate import Calibration
    from kvws.eval.head_choice import Choice
    from kvws.recall.profile import Profile

    heads = ((2, 3), (1, 0))
    profile = Profile(model, 3, 4, 2, 16, heads, (0,), "int8")
    return Calibration(profile, Choice(heads, "single", 0.5), dict.fromkeys(heads, 0.5), ())


def test_a_model_that_is_no_folder_is_refused(calibrate: Calibrate) -> None:
    assert "not a folder" in refused(calibrate("--model", "somebody/some-model"))
    assert "no config.json" in refused(calibrate("--model", "./absent"))


def test_a_model_without_a_chat_template_is_refused(calibrate: Calibrate, tiny_copy: Path) -> None:
    file = tiny_copy / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["chat_template"]
    file.write_text(json.dumps(settings))
    assert "has no chat template" in refused(calibrate("--model", tiny_copy))


def test_a_model_with_a_short_context_is_refused(calibrate: Calibrate, tiny_copy: Path) -> None:
    file = tiny_copy / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    assert "too short to calibrate" in refused(calibrate("--model", tiny_copy))


def test_a_model_without_weights_is_refused(calibrate: Calibrate, tiny_copy: Path) -> None:
    (tiny_copy / "model.safetensors").unlink()
    assert "no safetensors" in refused(calibrate("--model", tiny_copy))


def test_a_file_that_cannot_be_written_is_refused_before_the_minutes_are_spent(
    calibrate: Calibrate, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spent(*_: object, **__: object) -> object:
        raise AssertionError("calibrated")

    monkeypatch.setattr("kvws.eval.calibrate.calibrate", spent)
    (tmp_path / "file").write_text("")
    for out in (tmp_path, tmp_path / "file" / "profile.json"):
        assert "--out" in refused(calibrate("--model", tiny, "--out", out))


def test_one_history_is_too_few(calibrate: Calibrate, tiny: Path) -> None:
    assert calibrate("--model", tiny, "--histories", 1).exit_code == 2
