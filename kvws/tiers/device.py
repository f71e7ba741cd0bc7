"""The device tier: the engine's own KV pool, seen as pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from kvws.blocks.key import BLOCK_TOKENS


class DevicePool(Protocol):
    """Per layer K and V [slots, kv_heads, head_dim]; page p is slots 32p … 32p + 31."""

    @property
    def k_buffer(self) -> Sequence[torch.Tensor]: ...

    @property
    def v_buffer(self) -> Sequence[torch.Tensor]: ...


def paged(buffer: torch.Tensor) -> torch.Tensor:
    """[slots, kv_heads, head_dim] → [pages, BLOCK_TOKENS, kv_heads, head_dim], a view."""
    return buffer.view(-1, BLOCK_TOKENS, *buffer.shape[1:])
