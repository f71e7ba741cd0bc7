"""Which model and layout the blocks of a workspace belong to."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, cast

from kvws.errors import StoreFormatError

_TEXTS = ("model", "weights", "rotary", "dtype")
_DIGESTS = {"weights": "other weights", "rotary": "other rotary tables"}
_COUNTS = {
    "layers": "layers",
    "kv_heads": "KV heads",
    "head_dim": "values per head",
    "ranks": "ranks",
    "block_tokens": "tokens per block",
}
_MAX_TEXT_CHARACTERS = 4096
_MAX_COUNT = 1 << 20


@dataclass(frozen=True)
class ModelIdentity:
    """What must be equal for stored KV to mean the same to the engine.

    Attributes:
        model: as the user named it; for display, not compared.
        weights: hex digest over samples of the loaded weights.
        rotary: hex digest of the rotary tables.
        dtype: of the KV as it leaves the engine, such as "float16".
        layers: layers that keep KV.
        kv_heads: over all ranks.
        head_dim: values of one head's K or V.
        ranks: tensor-parallel ranks; each stores its own share of the heads.
        block_tokens: tokens of one block.
    """

    model: str
    weights: str
    rotary: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    ranks: int
    block_tokens: int

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a manifest."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: object) -> ModelIdentity:
        """Read what `as_dict` made.

        Raises:
            StoreFormatError: fields are missing, unknown or of the wrong kind.
        """
        if not isinstance(content, dict):
            raise StoreFormatError("the model identity is no table of fields")
        values = cast(dict[str, Any], content)
        unexpected = values.keys() ^ {field.name for field in fields(cls)}
        if unexpected:
            names = ", ".join(sorted(map(str, unexpected)))
            raise StoreFormatError(f"the model identity has other fields: {names}")
        for name in _TEXTS:
            value = values[name]
            if not isinstance(value, str) or len(value) > _MAX_TEXT_CHARACTERS:
                raise StoreFormatError(f"the model identity's {name} is no text")
        for name in _COUNTS:
            value = values[name]
            if type(value) is not int or not 0 < value <= _MAX_COUNT:
                raise StoreFormatError(f"the model identity's {name} is no positive number")
        return cls(**values)

    def differences(self, engine: ModelIdentity) -> list[str]:
        """How this identity, of a stored workspace, differs from the engine's: one phrase each.

        Empty when the blocks can be used.
        """
        found = [
            phrase
            for name, phrase in _DIGESTS.items()
            if getattr(self, name) != getattr(engine, name)
        ]
        if self.dtype != engine.dtype:
            found.append(f"KV in {self.dtype}, the engine has {engine.dtype}")
        for name, unit in _COUNTS.items():
            stored, current = getattr(self, name), getattr(engine, name)
            if stored != current:
                one = unit.removesuffix("s") if stored == 1 else unit
                found.append(f"{stored} {one}, the engine has {current}")
        return found
