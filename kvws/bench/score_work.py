"""What exact scoring has to do at least: bytes to read, and multiplications."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvws.blocks.key import BLOCK_TOKENS
from kvws.kernels.candidates import PIECE_BLOCKS
from kvws.models.geometry import ModelGeometry
from kvws.recall.profile import Profile
from kvws.recall.signals.rotated_mean import ASKING_TOKENS, default_rotated_layers
from kvws.recall.signals.signal import asking_tokens

_PRODUCT_VALUES = 1 << 18
"""Of keys and products together: they stay in a core's cache."""


@dataclass(frozen=True)
class Multiplications:
    """Matrix products of one signal.

    Attributes:
        operations: multiplications and additions of all of them.
        shape: of a product that is much like one of them: query rows, the common dimension, keys.
    """

    operations: int
    shape: tuple[int, int, int]


def multiplications(
    names: Sequence[str],
    geometry: ModelGeometry,
    profile: Profile,
    *,
    blocks: int,
    query_tokens: int,
) -> list[Multiplications]:
    """What the definitions of these signals ask for, one entry a signal: queries times keys.

    Exponentials, maxima and the rotation of block means come on top; they are no part of a limit.
    """
    work = _Work(geometry, profile, blocks, query_tokens)
    of_signal = {
        "mean-k": work.mean_k,
        "rotated-mean": work.rotated_mean,
        "content": work.content,
    }
    return [of_signal[name]() for name in names]


@dataclass(frozen=True)
class _Work:
    geometry: ModelGeometry
    profile: Profile
    blocks: int
    query_tokens: int

    def mean_k(self) -> Multiplications:
        return self._of_means(self.geometry.layers, self.geometry.head_dim, self.query_tokens)

    def rotated_mean(self) -> Multiplications:
        """Each row is a mean, and a variance for each pair of dimensions that are rotated."""
        geometry = self.geometry
        rotary_dim = geometry.rope.rotary_dim if geometry.rope is not None else geometry.head_dim
        layers = self.profile.rotated_layers or default_rotated_layers(geometry.layers)
        asking = len(asking_tokens(self.query_tokens, ASKING_TOKENS))
        return self._of_means(len(layers), geometry.head_dim + rotary_dim // 2, asking)

    def content(self) -> Multiplications:
        """Every token's key, or a block's mean, times the queries that share its KV head."""
        heads = self.profile.content_heads
        group = self.geometry.gqa_group
        kv_heads = len({(layer, head // group) for layer, head in heads})
        keys = 1 if self.profile.content_keys == "means" else BLOCK_TOKENS
        head_dim = self.geometry.head_dim
        queries = max(1, len(heads) * self.query_tokens // max(1, kv_heads))
        at_once = max(1, _PRODUCT_VALUES // (queries + head_dim))
        return Multiplications(
            2 * len(heads) * self.query_tokens * self.blocks * keys * head_dim,
            (queries, head_dim, min(PIECE_BLOCKS * keys, at_once)),
        )

    def _of_means(self, layers: int, width: int, tokens: int) -> Multiplications:
        geometry = self.geometry
        return Multiplications(
            2 * layers * geometry.query_heads * tokens * self.blocks * width,
            (geometry.gqa_group * tokens, width, PIECE_BLOCKS),
        )
