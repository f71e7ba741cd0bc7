"""The numbers of a model that decide how its KV is laid out, read from config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from kvws.errors import ModelError

_DEFAULT_ROPE_THETA = 10000.0
_OLD_ROPE_NAMES = {
    "rotary_emb_base": "rope_theta",
    "rope_theta": "rope_theta",
    "rotary_pct": "partial_rotary_factor",
    "partial_rotary_factor": "partial_rotary_factor",
}
_CONFIG_HINT = "give a folder in Hugging Face format that was downloaded or saved completely"


@dataclass(frozen=True)
class RopeParameters:
    """Rotary position encoding.

    Attributes:
        theta: base of the frequencies.
        type: "default", "linear", "llama3", "yarn", …
        rotary_dim: leading dimensions of a head that are rotated.
        scaling: the other parameters of `type`, as the config names them.
    """

    theta: float
    type: str
    rotary_dim: int
    scaling: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class ModelGeometry:
    """Sizes of a decoder-only model.

    Attributes:
        architecture: the config's first architecture, or its model type.
        layers, query_heads, kv_heads, head_dim: KV of one token is
            [layers, 2, kv_heads, head_dim].
        max_position: the longest sequence in tokens.
        vocab: number of token ids.
        rope: None where the config shows none.
    """

    architecture: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    max_position: int
    vocab: int
    rope: RopeParameters | None

    @property
    def gqa_group(self) -> int:
        """Query heads that share one KV head."""
        return self.query_heads // self.kv_heads

    @property
    def kv_values_per_token(self) -> int:
        """Numbers, K and V of all layers, that one token's KV consists of."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def load_config(path: str | Path) -> dict[str, Any]:
    """The language model's part of `path`/config.json.

    Raises:
        ModelError: no config.json there, or it is not a JSON object.
    """
    config_path = Path(path) / "config.json"
    try:
        config: Any = json.loads(config_path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{config_path} cannot be read: {error}", hint=_CONFIG_HINT) from error
    if not isinstance(config, dict):
        raise ModelError(f"{config_path} is not a JSON object", hint=_CONFIG_HINT)
    return language_config(cast("dict[str, Any]", config))


def language_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config`, with the language model's own settings on top where it nests them."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, dict) else dict(config)


def read_model_config(path: str | Path) -> ModelGeometry:
    """The geometry of the model in folder `path`.

    Raises:
        ModelError: config.json is missing or broken, or lacks a size.
    """
    return geometry_of(load_config(path))


def geometry_of(config: Mapping[str, Any]) -> ModelGeometry:
    """The geometry that `config` describes.

    Raises:
        ModelError: a size is missing, is no positive integer, or contradicts another one.
    """
    query_heads = _size(config, "num_attention_heads", "n_head")
    kv_heads = _size(config, "num_key_value_heads", default=query_heads)
    if query_heads % kv_heads:
        raise ModelError(
            f"config.json: {query_heads} query heads cannot share {kv_heads} KV heads",
            hint=_CONFIG_HINT,
        )
    head_dim = _size(
        config, "head_dim", default=_size(config, "hidden_size", "n_embd") // query_heads
    )
    return ModelGeometry(
        architecture=architecture_of(config),
        layers=_size(config, "num_hidden_layers", "n_layer"),
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=_size(config, "max_position_embeddings", "n_positions"),
        vocab=_size(config, "vocab_size"),
        rope=rope_of(config, head_dim),
    )


def architecture_of(config: Mapping[str, Any]) -> str:
    """The config's first architecture, or its model type."""
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures:
        return str(cast("list[Any]", architectures)[0])
    return str(config.get("model_type", "unknown"))


def rope_settings(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """RoPE settings under their newest names, or None where the config shows none.

    Newer configs hold all of them in `rope_parameters`, perhaps once per kind of layer; older
    ones in `rope_theta`, `partial_rotary_factor` and `rope_scaling`. Llama's first configs hold
    none at all.
    """
    settings: dict[str, Any] = {}
    found = config.get("model_type") == "llama"
    for key, name in _OLD_ROPE_NAMES.items():
        if config.get(key) is not None:
            settings[name] = config[key]
            found = True
    for key in ("rope_scaling", "rope_parameters"):
        found = found or key in config
        value = config.get(key)
        if isinstance(value, dict):
            settings |= _of_full_attention(cast("dict[str, Any]", value))
    if not found:
        return None
    settings.setdefault("rope_type", settings.pop("type", "default"))
    settings.setdefault("rope_theta", _DEFAULT_ROPE_THETA)
    return settings


def _of_full_attention(parameters: dict[str, Any]) -> dict[str, Any]:
    nested = parameters.get("full_attention")
    return cast("dict[str, Any]", nested) if isinstance(nested, dict) else parameters


def rope_of(config: Mapping[str, Any], head_dim: int) -> RopeParameters | None:
    """The RoPE that `config` describes for heads of `head_dim`.

    Raises:
        ModelError: a parameter is not a number.
    """
    settings = rope_settings(config)
    if settings is None:
        return None
    try:
        theta = float(settings.pop("rope_theta"))
        rotary_dim = int(head_dim * float(settings.pop("partial_rotary_factor", 1.0)))
    except (TypeError, ValueError, OverflowError) as error:
        raise ModelError(
            f"config.json: broken RoPE settings: {error}", hint=_CONFIG_HINT
        ) from error
    return RopeParameters(theta, str(settings.pop("rope_type")), rotary_dim, settings)


def _size(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    value = next((config[name] for name in names if config.get(name) is not None), default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(
            f"config.json: {names[0]} must be a positive integer, got {value!r}",
            hint=_CONFIG_HINT,
        )
    return value
