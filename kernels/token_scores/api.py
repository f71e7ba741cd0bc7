"""Scores of blocks by their token keys, over an index that comes in tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, get_args

import torch

from kvws.errors import ConfigError
from kvws.kernels.candidates import check_candidates, spread
from kvws.kernels.dispatch import check_dtype, check_name, check_same_device, resolve
from kvws.kernels.token_scores import integers, reference
from kvws.kernels.token_scores.formats import TokenFormat, format_of, part_shapes
from kvws.kernels.token_scores.standard import most_remarkable

Implementation = Literal["auto", "reference", "integers", "triton"]

LOGITS_BYTES = 64 << 20
"""Logits of blocks held at a time, whatever the number of query tokens and blocks. The more, the
less often keys are decoded."""


def token_scores(
    queries: Sequence[torch.Tensor],
    tiles: Sequence[tuple[torch.Tensor, ...]],
    candidates: Sequence[torch.Tensor],
    *,
    implementation: Implementation = "auto",
) -> torch.Tensor:
    """How far each candidate block stands out to the query token that finds most in it.

        score(b) = Σ_heads max_tokens z_b(max over the block's keys k of q·k)

    z_b: the deviation from the mean over the candidates of all tiles together, in their standard
    deviations; 0 where all are equal. "auto" is triton for CUDA tensors; elsewhere integers for
    codes, where the CPU has the instructions for them, and the reference.

    Args:
        queries: one entry a KV head, [tokens, query heads that share it, head_dim] float32.
        tiles: the tensors of each, in one of the formats of `formats.py`: each [kv_heads,
            tile_blocks, …].
        candidates: each [tile_blocks] bool, one per tile. Entries of other blocks are never
            read, so they may be uninitialised.

    Returns:
        [blocks of all tiles, in order] float32; exactly 0 where not a candidate.

    Raises:
        ConfigError: the implementation or a dtype is not supported.
        ValueError: a shape or a device contradicts another one.
    """
    if not queries or not tiles:
        return _nothing(candidates)
    _check_implementation(implementation, queries[0])
    tokens, _, head_dim = _check_queries(queries)
    format = _check_tiles(queries[0], tiles, candidates, (len(queries),), head_dim)
    largest = _largest_logits(implementation, queries[0], format, tiles, candidates)
    if largest.count == 0 or tokens == 0:
        return _nothing(candidates)
    scores = queries[0].new_zeros(largest.count)
    for kv_head, query in enumerate(queries):
        scores += _of_kv_head(query, kv_head, largest)
    return spread(candidates, scores)


def largest_logits(
    rows: torch.Tensor,
    tiles: Sequence[tuple[torch.Tensor, ...]],
    candidates: Sequence[torch.Tensor],
    *,
    implementation: Implementation = "auto",
) -> torch.Tensor:
    """The largest q·k of any key of each candidate block, for each query row.

    Args:
        rows: [rows, head_dim] float32.
        tiles: the tensors of each for one KV head, in one of the formats of `formats.py`: each
            [tile_blocks, …].
        candidates: as in `token_scores`.

    Returns:
        [candidates of all tiles, in order, rows] float32.

    Raises:
        ConfigError: the implementation or a dtype is not supported.
        ValueError: a shape or a device contradicts another one.
    """
    _check_implementation(implementation, rows)
    check_dtype("rows", rows, (torch.float32,))
    if rows.dim() != 2:
        raise ValueError(f"rows must be [rows, head_dim], got {tuple(rows.shape)}")
    if not tiles:
        return rows.new_empty((0, len(rows)))
    format = _check_tiles(rows, tiles, candidates, (), rows.shape[1])
    of_head = [tuple(part.unsqueeze(0) for part in parts) for parts in tiles]
    largest = _largest_logits(implementation, rows, format, of_head, candidates)
    out = rows.new_empty((largest.count, len(rows)))
    if out.numel():
        largest.write(rows, 0, out)
    return out


class _LargestLogits(Protocol):
    count: int

    def write(self, rows: torch.Tensor, kv_head: int, out: torch.Tensor) -> None: ...


def _largest_logits(
    implementation: Implementation,
    queries: torch.Tensor,
    format: TokenFormat,
    tiles: Sequence[tuple[torch.Tensor, ...]],
    candidates: Sequence[torch.Tensor],
) -> _LargestLogits:
    codes = format != "means" and queries.shape[-1] <= integers.HEAD_DIM_MAX
    if implementation == "integers" and not codes:
        raise ConfigError(
            f"the integers implementation needs codes of at most {integers.HEAD_DIM_MAX} "
            f"dimensions, got {format} of {queries.shape[-1]}",
            hint='ask for "auto" or "reference"',
        )
    automatic = implementation == "auto" and _has_integers(queries)
    if implementation == "integers" or (automatic and codes):
        return integers.LargestLogits(format, tiles, candidates)
    if resolve(implementation, queries) == "reference":
        return reference.LargestLogits(format, tiles, candidates)
    from kvws.kernels.token_scores import triton

    return triton.LargestLogits(format, tiles, candidates)


def _check_implementation(implementation: Implementation, queries: torch.Tensor) -> None:
    """Raises ConfigError unless it is one, and can run on this device."""
    check_name(implementation, get_args(Implementation))
    if implementation != "integers":
        resolve(implementation, queries)
    elif not _has_integers(queries):
        raise ConfigError(
            "the integers implementation needs tensors in CPU memory, and a CPU with AVX512 VNNI",
            hint='ask for "auto" or "reference"',
        )


def _has_integers(queries: torch.Tensor) -> bool:
    return queries.device.type == "cpu" and integers.cpu_multiplies_bytes()


def _of_kv_head(query: torch.Tensor, kv_head: int, largest: _LargestLogits) -> torch.Tensor:
    """What the query heads of one KV head find, together: [candidates]."""
    tokens, heads, _ = query.shape
    best = query.new_full((largest.count, heads), -torch.inf)
    step = min(tokens, max(1, LOGITS_BYTES // (4 * heads * largest.count)))
    buffer = query.new_empty(largest.count * step * heads)
    for start in range(0, tokens, step):
        rows = query[start : start + step].transpose(0, 1).flatten(0, 1)
        logits = buffer[: largest.count * len(rows)].view(largest.count, len(rows))
        largest.write(rows, kv_head, logits)
        best = torch.maximum(best, most_remarkable(logits, heads))
    return best.sum(dim=1)


def _nothing(candidates: Sequence[torch.Tensor]) -> torch.Tensor:
    blocks = sum(mask.numel() for mask in candidates)
    device = candidates[0].device if candidates else None
    return torch.zeros(blocks, dtype=torch.float32, device=device)


def _check_queries(queries: Sequence[torch.Tensor]) -> torch.Size:
    """The first one's shape, in which they may differ by their heads alone."""
    first = queries[0]
    for place, query in enumerate(queries):
        check_dtype(f"queries[{place}]", query, (torch.float32,))
        if query.dim() != 3 or query.shape[1] == 0 or query.shape[::2] != first.shape[::2]:
            raise ValueError(
                f"queries must be [tokens, heads, head_dim] of one query each: "
                f"got {tuple(first.shape)} and, at {place}, {tuple(query.shape)}"
            )
        check_same_device(queries=first, **{f"queries[{place}]": query})
    return first.shape


def _check_tiles(
    queries: torch.Tensor,
    tiles: Sequence[tuple[torch.Tensor, ...]],
    candidates: Sequence[torch.Tensor],
    before: tuple[int, ...],
    head_dim: int,
) -> TokenFormat:
    """Their format. `before`: what comes before a part's blocks."""
    format = format_of(tiles[0])
    if format is None:
        raise ConfigError(
            f"tiles are in no known format: got {_dtypes(tiles[0])}",
            hint="scales float16 and codes int8 or uint8, or means float16 alone",
        )
    if format == "int4" and head_dim % 2:
        raise ValueError(f"head_dim must be even for int4, got {head_dim}")
    at = len(before)
    check_candidates([parts[0].shape[at : at + 1] for parts in tiles], candidates)
    tokens = tiles[0][0].shape[at + 1] if tiles[0][0].dim() > at + 1 else 0
    for number, (parts, mask) in enumerate(zip(tiles, candidates, strict=True)):
        if format_of(parts) != format:
            raise ValueError(
                f"tiles[{number}] must have the first tile's dtypes: expected "
                f"{_dtypes(tiles[0])}, got {_dtypes(parts)}"
            )
        for part, shape in zip(parts, part_shapes(format, tokens, head_dim), strict=True):
            expected = (*before, mask.numel(), *shape)
            if tuple(part.shape) != expected:
                raise ValueError(
                    f"tiles[{number}] must agree with the queries and the candidates: "
                    f"expected {expected}, got {tuple(part.shape)}"
                )
            check_same_device(queries=queries, **{f"tiles[{number}]": part})
        check_same_device(queries=queries, **{f"candidates[{number}]": mask})
    return format


def _dtypes(parts: tuple[torch.Tensor, ...]) -> str:
    return " and ".join(str(part.dtype) for part in parts) or "nothing"
