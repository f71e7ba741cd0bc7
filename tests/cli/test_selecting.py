"""How views are chosen, from the settings and from what is known of the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvws.cli.selecting import selecting
from kvws.config import Settings
from kvws.errors import ConfigError, ModelError, ProfileError
from kvws.models.profiles import model_identity, user_profile_path
from kvws.recall.profile import Profile
from kvws.recall.recipe import FUSED, SignalName, recipe_named

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "max_position_embeddings": 128,
    "vocab_size": 8,
}


@pytest.fixture
def make_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """Makes a model that nobody has calibrated; the number makes its weights."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def make(seed: int = 0) -> Path:
        folder = tmp_path / f"model-{seed}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG))
        weights = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
        save_file({"w": weights}, str(folder / "model.safetensors"))
        return folder

    return make


def calibrated(model: Path, path: Path | None = None) -> Path:
    """Write the model's profile, by default where it is looked for."""
    profile = Profile(model_identity(model), 2, 4, 2, 8, ((1, 3),), (0,), "int8")
    path = path or user_profile_path(profile.model)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(profile.to_json())
    return path


def test_a_calibrated_model_gets_the_whole_default(make_model: Callable[..., Path]) -> None:
    model = make_model()
    path = calibrated(model)
    found = selecting(Settings(model="m"), model)
    assert found.recipe is FUSED and found.profile == path and found.notice == ""


def test_the_default_goes_on_without_a_profile_and_says_so(
    make_model: Callable[..., Path],
) -> None:
    found = selecting(Settings(model="a-model"), make_model())
    assert found.recipe == FUSED.without([SignalName.CONTENT]) and found.profile is None
    assert "a-model is not calibrated" in found.notice
    assert "kvws calibrate --model a-model" in found.notice
    assert all(name in found.notice for name in found.recipe.weights)
    assert "\n" not in found.notice


def test_content_asked_for_by_name_is_refused_without_a_profile(
    make_model: Callable[..., Path],
) -> None:
    for signals in ("content", "lexical,content"):
        with pytest.raises(ConfigError, match="no retrieval profile") as refused:
            selecting(Settings(model="a-model", signals=signals), make_model(len(signals)))
        assert "kvws calibrate --model a-model" in refused.value.hint


def test_signals_that_need_no_profile_need_no_notice(make_model: Callable[..., Path]) -> None:
    model = make_model()
    for signals in ("mean-k", "rotated-mean,lexical"):
        found = selecting(Settings(signals=signals), model)
        assert found.recipe == recipe_named(signals)
        assert found.profile is None and found.notice == ""


def test_a_signal_that_does_not_exist_is_refused(make_model: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="there is no signal 'mean'"):
        selecting(Settings(signals="mean"), make_model())


def test_a_profile_that_is_named_is_used(make_model: Callable[..., Path], tmp_path: Path) -> None:
    model = make_model()
    path = calibrated(model, tmp_path / "mine.json")
    found = selecting(Settings(profile=str(path), signals="content"), model)
    assert found.profile == path and found.recipe == recipe_named("content")


def test_a_profile_of_another_model_is_refused(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = make_model(0)
    path = calibrated(make_model(1), tmp_path / "mine.json")
    with pytest.raises(ProfileError, match="is the profile of model"):
        selecting(Settings(profile=str(path)), model)
    with pytest.raises(ProfileError, match="cannot be read"):
        selecting(Settings(profile=str(tmp_path / "absent.json")), model)


def test_a_model_whose_weights_are_elsewhere_has_no_profile() -> None:
    found = selecting(Settings(model="org/name"), "org/name")
    assert found.profile is None and "not calibrated" in found.notice
    with pytest.raises(ModelError, match="cannot be compared") as refused:
        selecting(Settings(model="org/name", profile="mine.json"), "org/name")
    assert "folder" in refused.value.hint
