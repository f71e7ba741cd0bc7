"""What makes stored KV useless to an engine: other weights, other positions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from kvws.kernels.rotary import RotaryTable

_SAMPLES = 256
"""Values looked at in each weight: a fine-tuned model differs in nearly all of them."""


def weights_digest(model: torch.nn.Module) -> str:
    """Hex digest over name, shape, dtype and evenly spaced values of every weight."""
    digest = hashlib.blake2b(digest_size=16)
    for name, weight in sorted(model.named_parameters(), key=lambda item: item[0]):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype};".encode())
        flat = weight.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLES)]
        digest.update(sample.to(torch.float32).cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def rotary_digest(tables: Sequence[RotaryTable]) -> str:
    """Hex digest over the cos/sin tables of all layers. A table's length is not part of it: it
    follows the engine's context length, and positions mean the same in a longer one."""
    digest = hashlib.blake2b(digest_size=16)
    seen: dict[int, bytes] = {}
    for table in tables:
        if id(table) not in seen:
            rows = torch.stack([table.cos[:_SAMPLES], table.sin[:_SAMPLES]])
            seen[id(table)] = rows.cpu().contiguous().numpy().tobytes()
        digest.update(seen[id(table)] + bytes([table.interleaved]))
    return digest.hexdigest()
