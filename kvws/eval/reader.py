"""A model that reads tokens over any KV: the judge of what a view is worth.

The engine hands out tokens, not distributions. Here the same weights run in transformers with an
attention of our own, which is given the keys before it, at whatever positions, and shows the
queries. Agreement with the engine over the same keys is tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvws.errors import ModelError
from kvws.kernels.rerope import rotate
from kvws.kernels.rotary import RotaryTable, rotation_between

_CHUNK_TOKENS = 512


@dataclass(frozen=True)
class KeyValues:
    """Keys and values of consecutive or chosen tokens.

    Attributes:
        keys: [layers, kv_heads, tokens, head_dim] float32, not rotated.
        values: [layers, kv_heads, tokens, head_dim] float32.
    """

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def tokens(self) -> int:
        return self.keys.shape[2]

    def of(self, tokens: torch.Tensor) -> KeyValues:
        """Those of some tokens, in the order given: [n] int64."""
        return KeyValues(self.keys[:, :, tokens], self.values[:, :, tokens])

    def before(self, tokens: int) -> KeyValues:
        """Those of the first tokens; shares memory."""
        return KeyValues(self.keys[:, :, :tokens], self.values[:, :, :tokens])

    def and_then(self, later: KeyValues) -> KeyValues:
        keys = torch.cat([self.keys, later.keys], dim=2)
        return KeyValues(keys, torch.cat([self.values, later.values], dim=2))


@dataclass(frozen=True)
class Reading:
    """What reading tokens gave.

    Attributes:
        key_values: of the tokens read.
        queries: [layers, tokens, query_heads, head_dim] float32, not rotated; None unless asked.
        hidden: [tokens, hidden] float32: states before the output matrix.
        mass: [layers, query_heads, tokens before] float32: attention that each earlier token drew,
            summed over the tokens read; None unless asked.
    """

    key_values: KeyValues
    queries: torch.Tensor | None
    hidden: torch.Tensor
    mass: torch.Tensor | None


class Reader:
    """One model on a CPU, in float32."""

    def __init__(self, model_path: str | Path) -> None:
        """Load it.

        Raises:
            ModelError: it cannot be loaded.
        """
        from kvws.engine.platform_entry import declare_torchvision_ops

        declare_torchvision_ops()
        from transformers import AttentionInterface, AutoModelForCausalLM

        interface: Any = AttentionInterface
        interface.register("kvws_reader", _attend)
        loader: Any = AutoModelForCausalLM
        try:
            self._model: Any = loader.from_pretrained(
                str(model_path), dtype=torch.float32, attn_implementation="kvws_reader"
            ).eval()
        except Exception as error:  # loaders raise whatever they like
            raise ModelError(
                f"{model_path} cannot be loaded: {error}", hint="give a Hugging Face folder"
            ) from error
        if not hasattr(getattr(self._model, "model", None), "rotary_emb"):
            raise ModelError(
                f"{model_path} is not built like Llama", hint="use a model of Llama's kind here"
            )
        config = self._model.config
        self.layers: int = config.num_hidden_layers
        self.query_heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.window_tokens: int = config.max_position_embeddings
        self.head_dim: int = getattr(config, "head_dim", None) or (
            config.hidden_size // self.query_heads
        )
        self.rotary = self._rotary_table()

    @torch.no_grad()
    def _rotary_table(self) -> RotaryTable:
        positions = torch.arange(self.window_tokens).unsqueeze(0)
        cos, sin = self._model.model.rotary_emb(torch.zeros(1), positions)
        half = cos.shape[-1] // 2
        return RotaryTable(
            cos[0, :, :half].float().contiguous(), sin[0, :, :half].float().contiguous(), False
        )

    def empty(self) -> KeyValues:
        """Nothing before the first token."""
        nothing = torch.zeros(self.layers, self.kv_heads, 0, self.head_dim)
        return KeyValues(nothing, nothing)

    @torch.no_grad()
    def read(
        self,
        tokens: Sequence[int],
        before: KeyValues | None = None,
        *,
        with_queries: bool = False,
        with_mass: bool = False,
    ) -> Reading:
        """Compute tokens behind others, which take positions 0, 1, … whatever they were.

        Args:
            before: keys and values of the tokens before, in order.
        """
        before = before if before is not None else self.empty()
        state = _State(self, before, with_queries=with_queries, with_mass=with_mass)
        hidden: list[torch.Tensor] = []
        for begin in range(0, len(tokens), _CHUNK_TOKENS):
            chunk = tokens[begin : begin + _CHUNK_TOKENS]
            first = before.tokens + begin
            place = torch.arange(first, first + len(chunk)).unsqueeze(0)
            state.begin(place[0])
            output = self._model.model(
                input_ids=torch.tensor([list(chunk)]),
                position_ids=place,
                use_cache=False,
                kvws_state=state,
            )
            hidden.append(output.last_hidden_state[0])
        return Reading(
            state.key_values(before.tokens),
            state.raw_queries(),
            torch.cat(hidden),
            state.mass,
        )

    @torch.no_grad()
    def log_probabilities(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, vocabulary] natural log, of the token behind each."""
        return self._model.lm_head(hidden).float().log_softmax(dim=-1)


class _State:
    """Keys and values that grow while chunks are read."""

    def __init__(
        self, reader: Reader, before: KeyValues, *, with_queries: bool, with_mass: bool
    ) -> None:
        self._rotary = reader.rotary
        self._layers = reader.layers
        heads = reader.layers * reader.kv_heads
        places = torch.arange(before.tokens).repeat(heads)
        flat = before.keys.reshape(-1, 1, reader.head_dim)
        keys = rotate(flat, rotation_between(reader.rotary, None, places))
        self._keys = list(keys.view(before.keys.shape))
        self._values = list(before.values)
        self._queries: list[list[torch.Tensor]] | None = (
            [[] for _ in range(reader.layers)] if with_queries else None
        )
        self._positions: list[torch.Tensor] = []
        self._visible = torch.empty(0)
        self.mass: torch.Tensor | None = None
        if with_mass:
            self.mass = torch.zeros(reader.layers, reader.query_heads, before.tokens)

    def begin(self, places: torch.Tensor) -> None:
        """Tokens of the next chunk. `places`: [n] int64."""
        self._positions.append(places)
        seen = int(places[-1]) + 1
        self._visible = torch.ones(len(places), seen, dtype=torch.bool).tril(seen - len(places))

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """q: [query_heads, n, d]; k, v: [kv_heads, n, d], rotated. Returns [n, query_heads, d]."""
        if self._queries is not None:
            self._queries[layer].append(q.transpose(0, 1).contiguous())
        keys = self._keys[layer] = torch.cat([self._keys[layer], k], dim=1)
        values = self._values[layer] = torch.cat([self._values[layer], v], dim=1)
        group = q.shape[0] // keys.shape[0]
        if self.mass is not None:
            grouped: torch.Tensor = q.view(keys.shape[0], group, *q.shape[1:])
            logits = grouped @ keys.unsqueeze(1).mT
            logits = (logits * scaling).masked_fill(~self._visible, -torch.inf)
            weights = logits.softmax(dim=-1).flatten(0, 1)
            before = self.mass.shape[2]
            self.mass[layer] += weights[:, :, :before].sum(dim=1)
        out = torch.nn.functional.scaled_dot_product_attention(
            q.unsqueeze(0),
            keys.repeat_interleave(group, dim=0).unsqueeze(0),
            values.repeat_interleave(group, dim=0).unsqueeze(0),
            attn_mask=self._visible,
            scale=scaling,
        )
        return out[0].transpose(0, 1)

    def key_values(self, from_token: int) -> KeyValues:
        places = torch.cat(self._positions)
        keys = torch.stack([keys[:, from_token:] for keys in self._keys])
        back = rotation_between(
            self._rotary, places.repeat(keys.shape[0] * keys.shape[1]), None
        )
        raw = rotate(keys.reshape(-1, 1, keys.shape[3]), back).view(keys.shape)
        return KeyValues(raw, torch.stack([v[:, from_token:] for v in self._values]))

    def raw_queries(self) -> torch.Tensor | None:
        if self._queries is None:
            return None
        places = torch.cat(self._positions)
        queries = torch.stack([torch.cat(chunks) for chunks in self._queries])
        back = rotation_between(self._rotary, places.repeat(self._layers), None)
        return rotate(queries.flatten(0, 1), back).view(queries.shape)


def _attend(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float, **kw: Any
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: [1, heads, n, d] in, [1, n, heads, d] out."""
    state: _State = kw["kvws_state"]
    out = state.attend(module.layer_idx, query[0], key[0], value[0], scaling)
    return out.unsqueeze(0), None
