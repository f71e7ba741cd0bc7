"""What a calibration found out about a model: the layers and heads that recall well."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, cast, get_args

from kvws.errors import ProfileError

ContentKeys = Literal["int4", "int8", "means"]
"""How the keys of content heads are kept: every token's key quantised, or the block's mean."""

PROFILE_FORMAT = "kvws-profile/1"

_HINT = "make the profile anew with kvws calibrate"


@dataclass(frozen=True)
class Profile:
    """The retrieval profile of one model.

    Attributes:
        model: identity of the model's config and weights.
        layers, query_heads, kv_heads, head_dim: the model's, over all tensor-parallel ranks.
        content_heads: distinct (layer, query head) that find content, the best first.
        rotated_layers: distinct layers, ascending, that the rotation-aware score reads.
        content_keys: how the keys of content heads are kept.
    """

    model: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    content_heads: tuple[tuple[int, int], ...]
    rotated_layers: tuple[int, ...]
    content_keys: ContentKeys

    def __post_init__(self) -> None:
        """Raises ProfileError when the parts contradict each other."""
        if not self.model:
            raise ProfileError("a profile names no model", hint=_HINT)
        for name in ("layers", "query_heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ProfileError(f"a profile says {name} = {getattr(self, name)}", hint=_HINT)
        if self.query_heads % self.kv_heads:
            raise ProfileError(
                f"a profile says that {self.query_heads} query heads share {self.kv_heads} KV "
                "heads",
                hint=_HINT,
            )
        if self.content_keys not in get_args(ContentKeys):
            raise ProfileError(
                f"a profile says content_keys = {self.content_keys!r}",
                hint=f"one of {', '.join(get_args(ContentKeys))}",
            )
        for layer, head in self.content_heads:
            if not (0 <= layer < self.layers and 0 <= head < self.query_heads):
                raise ProfileError(
                    f"a profile names head {layer}.{head} of a model with {self.layers} layers "
                    f"of {self.query_heads} query heads",
                    hint=_HINT,
                )
        if len(set(self.content_heads)) != len(self.content_heads):
            raise ProfileError("a profile names a content head twice", hint=_HINT)
        if list(self.rotated_layers) != sorted(set(self.rotated_layers)):
            raise ProfileError("a profile's rotated_layers do not ascend", hint=_HINT)
        outside = [layer for layer in self.rotated_layers if not 0 <= layer < self.layers]
        if outside:
            raise ProfileError(
                f"a profile names layer {outside[0]} of a model with {self.layers} layers",
                hint=_HINT,
            )

    def to_json(self) -> str:
        """The text that `from_json` reads."""
        return json.dumps({"format": PROFILE_FORMAT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Read a profile.

        Raises:
            ProfileError: it is no profile, of another format version, or contradicts itself.
        """
        content = _object(text)
        if content.pop("format", None) != PROFILE_FORMAT:
            raise ProfileError(f"this is no {PROFILE_FORMAT} profile", hint=_HINT)
        names = {field.name for field in fields(cls)}
        for problem, wrong in (
            ("lacks", names - content.keys()),
            ("has an unknown", content.keys() - names),
        ):
            if wrong:
                raise ProfileError(f"a profile {problem} {min(wrong)}", hint=_HINT)
        return cls(
            model=_text(content, "model"),
            layers=_number("layers", content["layers"]),
            query_heads=_number("query_heads", content["query_heads"]),
            kv_heads=_number("kv_heads", content["kv_heads"]),
            head_dim=_number("head_dim", content["head_dim"]),
            content_heads=tuple(
                _head(item) for item in _list("content_heads", content["content_heads"])
            ),
            rotated_layers=tuple(
                _number("rotated_layers", item)
                for item in _list("rotated_layers", content["rotated_layers"])
            ),
            content_keys=cast(ContentKeys, _text(content, "content_keys")),
        )

    def require_fits(
        self, *, layers: int, query_heads: int, kv_heads: int, head_dim: int
    ) -> None:
        """Raises ProfileError when it was made for a model of other sizes."""
        wanted = (layers, query_heads, kv_heads, head_dim)
        own = (self.layers, self.query_heads, self.kv_heads, self.head_dim)
        if own != wanted:
            raise ProfileError(
                f"the profile of {self.model} is for (layers, query heads, KV heads, head "
                f"size) = {own}; the model has {wanted}",
                hint=_HINT,
            )


def _object(text: str) -> dict[str, Any]:
    try:
        content: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"a profile cannot be read: {error}", hint=_HINT) from error
    if not isinstance(content, dict):
        raise ProfileError("a profile is no JSON object", hint=_HINT)
    return cast("dict[str, Any]", content)


def _text(content: Mapping[str, Any], name: str) -> str:
    value = content[name]
    if not isinstance(value, str):
        raise ProfileError(f"a profile says {name} = {value!r}, which is no text", hint=_HINT)
    return value


def _number(name: str, value: Any) -> int:
    if type(value) is not int:
        raise ProfileError(f"a profile says {name}: {value!r}, no whole number", hint=_HINT)
    return value


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ProfileError(f"a profile says {name} = {value!r}, which is no list", hint=_HINT)
    return cast("list[Any]", value)


def _head(value: Any) -> tuple[int, int]:
    pair = _list("content_heads", value)
    if len(pair) != 2:
        raise ProfileError(f"a profile names the head {pair!r}", hint="[layer, query head]")
    return _number("content_heads", pair[0]), _number("content_heads", pair[1])
