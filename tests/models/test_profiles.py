"""A profile is found by the identity of its model, and used for no other."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvws.errors import ModelError, ProfileError
from kvws.models import profiles
from kvws.models.profiles import find_profile, load_profile, model_identity, user_profile_path
from kvws.recall.profile import Profile

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
Weights = dict[str, torch.Tensor]
MakeModel = Callable[..., Path]


def weights() -> Weights:
    random = torch.Generator().manual_seed(0)
    return {name: torch.randn(64, 16, generator=random) for name in ("a", "b", "c")}


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    def make(name: str = "model", files: tuple[Weights, ...] = (), **config: object) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG | config))
        for number, part in enumerate(files or (weights(),)):
            save_file(part, str(folder / f"model-{number}.safetensors"))
        return folder

    return make


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(tmp_path / "config")}


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shipped"
    folder.mkdir()
    monkeypatch.setattr(profiles, "_SHIPPED", folder)
    return folder


def profile_of(model: Path) -> Profile:
    return Profile(model_identity(model), 2, 4, 2, 8, ((1, 3),), (0,), "int8")


def write(path: Path, profile: Profile) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(profile.to_json())
    return path


def test_the_same_model_is_known_again_however_it_is_stored(make_model: MakeModel) -> None:
    whole = weights()
    parts = ({"c": whole["c"]}, {"b": whole["b"], "a": whole["a"]})
    other_words = {"transformers_version": "9", "torch_dtype": "float32"}
    again = make_model("again", parts, **other_words)
    assert model_identity(make_model()) == model_identity(again)


@pytest.mark.parametrize("change", ["last value", "name", "dtype", "shape", "rope", "layers"])
def test_another_model_is_another(make_model: MakeModel, change: str) -> None:
    other, config = weights(), {}
    match change:
        case "last value":
            other["b"][-1, -1] += 1
        case "name":
            other["d"] = other.pop("c")
        case "dtype":
            other["a"] = other["a"].half()
        case "shape":
            other["a"] = other["a"].view(16, 64)
        case "rope":
            config = {"rope_theta": 5e5}
        case _:
            config = {"num_hidden_layers": 3}
    assert model_identity(make_model()) != model_identity(make_model("other", (other,), **config))


def test_a_folder_without_readable_weights_is_refused(make_model: MakeModel) -> None:
    model = make_model()
    weights_file = model / "model-0.safetensors"
    for broken in (b"", b"\xff" * 64, (9).to_bytes(8, "little") + b"{}"):
        weights_file.write_bytes(broken)
        with pytest.raises(ModelError, match="cannot be read"):
            model_identity(model)
    weights_file.unlink()
    with pytest.raises(ModelError, match="no safetensors"):
        model_identity(model)


def test_the_users_profile_comes_before_the_shipped_one(
    make_model: MakeModel, home: dict[str, str], shipped: Path
) -> None:
    model = make_model()
    assert find_profile(model, home) is None
    of_kvws = profile_of(model)
    shipped_file = write(shipped / f"{of_kvws.model}.json", of_kvws)
    assert find_profile(model, home) == (of_kvws, shipped_file)
    own = replace(of_kvws, content_heads=((0, 0),))
    own_file = write(user_profile_path(of_kvws.model, home), own)
    assert find_profile(model, home) == (own, own_file)


def test_a_profile_of_another_model_is_not_used(
    make_model: MakeModel, home: dict[str, str], shipped: Path
) -> None:
    model, other = make_model(), make_model("other", rope_theta=5e5)
    write(shipped / f"{model_identity(other)}.json", profile_of(other))
    assert find_profile(model, home) is None
    explicit = write(shipped / "mine.json", profile_of(other))
    with pytest.raises(ProfileError, match="is the profile of model"):
        load_profile(explicit, model)
    assert load_profile(explicit, other) == profile_of(other)
    write(user_profile_path(model_identity(model), home), profile_of(other))
    with pytest.raises(ProfileError, match="is the profile of model"):
        find_profile(model, home)


def test_a_profile_that_cannot_be_read_is_an_error(
    make_model: MakeModel, home: dict[str, str], shipped: Path, tmp_path: Path
) -> None:
    model = make_model()
    path = user_profile_path(model_identity(model), home)
    path.parent.mkdir(parents=True)
    for content in (b"{", b"\xff"):
        path.write_bytes(content)
        with pytest.raises(ProfileError):
            find_profile(model, home)
    with pytest.raises(ProfileError, match="cannot be read"):
        load_profile(tmp_path / "absent.json", model)


def test_a_profile_of_other_sizes_does_not_fit(make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model()
    path = write(tmp_path / "wrong.json", replace(profile_of(model), layers=5))
    with pytest.raises(ProfileError, match="the model has"):
        load_profile(path, model)


def test_the_users_folder_is_beside_his_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert user_profile_path("0a") == Path("/home/somebody/.config/kvws/profiles/0a.json")


def test_the_packaged_model_has_a_profile(smollm2: Path, tmp_path: Path) -> None:
    found = find_profile(smollm2, {"XDG_CONFIG_HOME": str(tmp_path)})
    assert found is not None
    profile, path = found
    assert path.name == f"{profile.model}.json" and len(profile.content_heads) >= 2
