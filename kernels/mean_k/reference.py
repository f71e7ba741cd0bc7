"""Mean of rotated keys in torch: the specification of the operation, and its CPU version."""

from __future__ import annotations

import torch

from kvws.kernels.rotary import Rotation, pairs

SCRATCH_BYTES = 1 << 20
"""fp32 keys of one chunk of blocks: the passes over a chunk find it in cache."""


@torch.no_grad()
def mean_rotated(k: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Mean over tokens of k after its rotation.

    Σ(a·cos - b·sin) is summed as Σ a·cos - Σ b·sin: two products over whole heads, summed over
    tokens, and the pairs are only put together in the small result.

    Args:
        k: [blocks, block_tokens, heads, head_dim], any payload dtype.
        rotation: of the blocks·block_tokens tokens, in order.

    Returns:
        [blocks, heads, head_dim] float32.
    """
    blocks, block_tokens, heads, head_dim = k.shape
    rotary_dim = rotation.rotary_dim
    cos = rotation.wide_cos.reshape(blocks, block_tokens, 1, rotary_dim)
    sin = rotation.wide_sin.reshape(blocks, block_tokens, 1, rotary_dim)
    out = torch.empty((blocks, heads, head_dim), dtype=torch.float32, device=k.device)
    crossed = torch.empty((blocks, heads, rotary_dim), dtype=torch.float32, device=k.device)
    step = max(1, SCRATCH_BYTES // max(1, 4 * block_tokens * heads * head_dim))
    for start in range(0, blocks, step):
        chunk = slice(start, start + step)
        x = k[chunk].float()
        turned = x[..., :rotary_dim]
        torch.sum(turned * cos[chunk], dim=1, out=out[chunk, :, :rotary_dim])
        torch.sum(turned * sin[chunk], dim=1, out=crossed[chunk])
        torch.sum(x[..., rotary_dim:], dim=1, out=out[chunk, :, rotary_dim:])
    a, b = pairs(crossed, rotary_dim, rotation.interleaved)
    out_a, out_b = pairs(out, rotary_dim, rotation.interleaved)
    out_a.sub_(b)
    out_b.add_(a)
    return out.div_(block_tokens)
