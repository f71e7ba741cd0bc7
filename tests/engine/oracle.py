"""transformers as the reference: raw keys of a history, and answers behind a compact view."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvws.engine.platform_entry import declare_torchvision_ops

declare_torchvision_ops()

from transformers import AutoModelForCausalLM, DynamicCache  # noqa: E402


@dataclass
class RawHistory:
    """Raw K and V of a history, per layer [1, kv_heads, tokens, head_dim]."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]


class Oracle:
    """A plain fp32 transformers model. Rotations are its own `apply_rotary_pos_emb`."""

    def __init__(self, model_path: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        self._apply = sys.modules[type(self.model).__module__].apply_rotary_pos_emb

    @torch.no_grad()
    def history(self, token_ids: Sequence[int]) -> RawHistory:
        """Prefill a history at positions 0 … n - 1 and take the rotation off its keys."""
        cache = DynamicCache(config=self.model.config)
        self.model(torch.tensor([list(token_ids)]), past_key_values=cache, logits_to_keep=1)
        positions = torch.arange(len(token_ids))
        return RawHistory(
            [self._rotate(layer.keys, positions, backwards=True) for layer in cache.layers],
            [layer.values for layer in cache.layers],
        )

    @torch.no_grad()
    def greedy(
        self, history: RawHistory | None, rows: torch.Tensor, query: Sequence[int], count: int
    ) -> tuple[list[int], torch.Tensor]:
        """Answer behind the given rows of a history, placed at positions 0, 1, 2, …

        Returns:
            (tokens, log-probabilities [count, vocabulary]).
        """
        cache = DynamicCache(config=self.model.config)
        length = 0 if history is None else len(rows)
        if history is not None:
            positions = torch.arange(length)
            for layer, (keys, values) in enumerate(
                zip(history.keys, history.values, strict=True)
            ):
                moved = self._rotate(keys[:, :, rows], positions, backwards=False)
                cache.update(moved, values[:, :, rows], layer)
        feed, tokens, logprobs = list(query), list[int](), list[torch.Tensor]()
        for _ in range(count):
            positions = torch.arange(length, length + len(feed))[None]
            output = self.model(
                torch.tensor([feed]), past_key_values=cache, position_ids=positions
            )
            logprobs.append(output.logits[0, -1].log_softmax(-1))
            length += len(feed)
            feed = [int(logprobs[-1].argmax())]
            tokens += feed
        return tokens, torch.stack(logprobs)

    def _rotate(
        self, x: torch.Tensor, positions: torch.Tensor, *, backwards: bool
    ) -> torch.Tensor:
        """`x`: [1, heads, tokens, head_dim]; partial rotary leaves the tail alone."""
        cos, sin = self.model.base_model.rotary_emb(x, positions[None])
        size = cos.shape[-1]
        rotated, _ = self._apply(x[..., :size], x[..., :size], cos, -sin if backwards else sin)
        scale = float((cos[0, 0, 0] ** 2 + sin[0, 0, 0] ** 2).detach()) if backwards else 1.0
        return torch.cat([rotated / scale, x[..., size:]], dim=-1)


def rows_of_blocks(blocks: Sequence[int]) -> torch.Tensor:
    """Token rows of 32-token blocks, in the given order."""
    return torch.cat([torch.arange(block * 32, (block + 1) * 32) for block in blocks])
