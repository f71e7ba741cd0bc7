"""From logits to the score of a block, on any device: how remarkable a query finds it."""

from __future__ import annotations

import torch

CHUNK_BYTES = 1 << 20
"""Logits of so many blocks that what follows a pass over them finds them in cache."""


def most_remarkable(logits: torch.Tensor, heads: int) -> torch.Tensor:
    """Each block's largest deviation from the mean of all blocks, in standard deviations of them,
    to any query token of a head.

    Where all blocks are equal, as far as fp32 tells, it is 0.

    Mutates: `logits`, [blocks, heads·tokens], head first.

    Returns:
        [blocks, heads].
    """
    blocks, rows = logits.shape
    chunks = torch.split(logits, max(1, CHUNK_BYTES // (4 * rows)))
    mean = logits.mean(dim=0)
    squares = torch.zeros_like(mean)
    for chunk in chunks:
        squares += chunk.sub_(mean).square().sum(dim=0)
    variance = squares / blocks
    size = (variance + mean.square()).sqrt()
    deviation = variance.sqrt()
    per_deviation = torch.where(deviation > 1e-6 * size, 1 / deviation, 0.0)
    found = [chunk.mul_(per_deviation).view(len(chunk), heads, -1).amax(dim=2) for chunk in chunks]
    return torch.cat(found)
