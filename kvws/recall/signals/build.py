"""From names to signals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvws.errors import ConfigError
from kvws.kernels.rotary import RotaryTable
from kvws.recall.profile import Profile
from kvws.recall.signals.content import Content
from kvws.recall.signals.enabled import EnabledSignals
from kvws.recall.signals.mean_k import MeanK
from kvws.recall.signals.rotated_mean import RotatedMean, default_rotated_layers
from kvws.recall.signals.signal import Signal

SIGNAL_NAMES = ("mean-k", "rotated-mean", "content")
"""The signals that live beside the keys, in the order of their parts in a row."""


@dataclass(frozen=True)
class KeyGeometry:
    """Sizes of the keys that one tensor-parallel rank holds.

    Attributes:
        kv_heads: of this rank.
        rank, ranks: which one of how many.
    """

    layers: int
    kv_heads: int
    head_dim: int
    rank: int = 0
    ranks: int = 1


def enabled_signals(
    names: Iterable[str],
    geometry: KeyGeometry,
    rotary: Sequence[RotaryTable],
    profile: Profile | None = None,
) -> EnabledSignals:
    """The signals of these names, in the order of SIGNAL_NAMES.

    Args:
        rotary: the table of every layer, on the CPU.
        profile: of the model; without one there is no `content`.

    Raises:
        ConfigError: a name is unknown, or needs a profile.
        ProfileError: the profile is of a model of other sizes.
    """
    wanted = set(names)
    unknown = sorted(wanted - set(SIGNAL_NAMES))
    if unknown:
        raise ConfigError(
            f"there is no signal {unknown[0]!r} beside the keys",
            hint=f"choose from {', '.join(SIGNAL_NAMES)}",
        )
    if profile is not None:
        _require_fits(profile, geometry)
    signals: list[Signal] = []
    for name in SIGNAL_NAMES:
        if name in wanted:
            signals.append(_signal(name, geometry, rotary, profile))
    return EnabledSignals(signals, rotary)


def _signal(
    name: str, geometry: KeyGeometry, rotary: Sequence[RotaryTable], profile: Profile | None
) -> Signal:
    layers, kv_heads, head_dim = geometry.layers, geometry.kv_heads, geometry.head_dim
    if name == "mean-k":
        return MeanK(layers, kv_heads, head_dim)
    if name == "rotated-mean":
        chosen = profile.rotated_layers if profile is not None else ()
        return RotatedMean(
            chosen or default_rotated_layers(layers), kv_heads, head_dim, rotary
        )
    if profile is None:
        raise ConfigError(
            "the signal content needs a profile of the model",
            hint="make one with kvws calibrate, or leave content out of --signals",
        )
    query_heads = profile.query_heads // geometry.ranks
    first = geometry.rank * query_heads
    return Content(
        [
            (layer, head - first)
            for layer, head in profile.content_heads
            if first <= head < first + query_heads
        ],
        group=query_heads // kv_heads,
        head_dim=head_dim,
        precision=profile.content_keys,
    )


def _require_fits(profile: Profile, geometry: KeyGeometry) -> None:
    """More ranks than KV heads hold copies of them."""
    held = geometry.kv_heads * geometry.ranks
    copies = profile.kv_heads < geometry.ranks and geometry.kv_heads == 1
    profile.require_fits(
        layers=geometry.layers,
        query_heads=profile.query_heads,
        kv_heads=profile.kv_heads if copies else held,
        head_dim=geometry.head_dim,
    )
    if profile.query_heads % geometry.ranks:
        raise ConfigError(
            f"{profile.query_heads} query heads cannot be shared out over {geometry.ranks} ranks"
        )
