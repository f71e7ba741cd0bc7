"""Where a model's retrieval profile is kept, and whose it is.

A profile is a file `<identity>.json`: in the user's folder, where `kvws calibrate` writes it, or
in this package. It is used only with the model whose identity it names.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, cast

from kvws.errors import ModelError, ProfileError
from kvws.models.geometry import read_model_config
from kvws.recall.profile import Profile

_SHIPPED = Path(__file__).with_name("profiles")
_SAMPLES = 8
_SAMPLE_BYTES = 64
_MAX_HEADER_BYTES = 100_000_000
_WEIGHTS_HINT = "give a complete Hugging Face folder with model*.safetensors"


def model_identity(model_path: Path) -> str:
    """Hex digest over a model folder's sizes, positions, and evenly spaced bytes of each weight.

    How the weights are spread over files is not part of it; their precision is. Takes
    milliseconds for small models, seconds for the largest.

    Raises:
        ModelError: the folder lacks config.json or safetensors, or they are broken.
    """
    digest = hashlib.blake2b(digest_size=16)
    geometry = asdict(read_model_config(model_path))
    digest.update(json.dumps(geometry, sort_keys=True, default=str).encode())
    files = sorted(model_path.glob("model*.safetensors")) or sorted(
        model_path.glob("*.safetensors")
    )
    if not files:
        raise ModelError(f"{model_path} has no safetensors", hint=_WEIGHTS_HINT)
    weights: dict[str, bytes] = {}
    for path in files:
        try:
            with path.open("rb") as file:
                weights |= _sampled_weights(file)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{path} cannot be read: {error}", hint=_WEIGHTS_HINT) from error
    for name in sorted(weights):
        digest.update(name.encode() + b"\0" + weights[name])
    return digest.hexdigest()


def _sampled_weights(file: BinaryIO) -> dict[str, bytes]:
    """Per weight of a safetensors file: its type, shape and samples."""
    header_bytes = int.from_bytes(file.read(8), "little")
    if header_bytes > _MAX_HEADER_BYTES:
        raise ValueError("its header is too long")
    header: Any = json.loads(_read_whole(file, header_bytes))
    sampled: dict[str, bytes] = {}
    for name, entry in cast("dict[str, dict[str, Any]]", header).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + header_bytes + int(offset) for offset in entry["data_offsets"])
        parts = [f"{entry['dtype']} {entry['shape']};".encode()]
        last = max(begin, end - _SAMPLE_BYTES)
        for number in range(_SAMPLES):
            place = begin + (last - begin) * number // (_SAMPLES - 1)
            file.seek(place)
            parts.append(_read_whole(file, min(_SAMPLE_BYTES, end - place)))
        sampled[name] = b"".join(parts)
    return sampled


def _read_whole(file: BinaryIO, count: int) -> bytes:
    read = file.read(count)
    if len(read) < count:
        raise ValueError("it ends too early")
    return read


def user_profile_path(identity: str, environment: Mapping[str, str] | None = None) -> Path:
    """Where the user's profile of a model is, beside the user's config.toml."""
    home = (os.environ if environment is None else environment).get("XDG_CONFIG_HOME")
    base = Path(home) if home else Path.home() / ".config"
    return base / "kvws" / "profiles" / f"{identity}.json"


def find_profile(
    model_path: Path, environment: Mapping[str, str] | None = None
) -> tuple[Profile, Path] | None:
    """A model's profile and its file: the user's own first, then the one shipped with kvws.

    Args:
        environment: the process environment by default.

    Returns:
        None when there is neither.

    Raises:
        ModelError: the model's folder cannot be read.
        ProfileError: the file found cannot be read, or names another model.
    """
    identity = model_identity(model_path)
    for path in (user_profile_path(identity, environment), _SHIPPED / f"{identity}.json"):
        if path.exists():
            return _profile_of(path, model_path, identity), path
    return None


def load_profile(path: Path, model_path: Path) -> Profile:
    """The profile in a file that was named explicitly.

    Raises:
        ModelError: the model's folder cannot be read.
        ProfileError: the file cannot be read, or names another model.
    """
    return _profile_of(path, model_path, model_identity(model_path))


def _profile_of(path: Path, model_path: Path, identity: str) -> Profile:
    try:
        profile = Profile.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(
            f"the profile {path} cannot be read: {error}",
            hint="make it anew with kvws calibrate",
        ) from error
    if profile.model != identity:
        raise ProfileError(
            f"{path} is the profile of model {profile.model}, {model_path} is {identity}",
            hint="calibrate this model with kvws calibrate",
        )
    geometry = read_model_config(model_path)
    profile.require_fits(
        layers=geometry.layers,
        query_heads=geometry.query_heads,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
    )
    return profile
