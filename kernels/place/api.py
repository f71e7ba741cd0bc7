"""Blocks of one layer from the host tier into pages of the engine's pool, in one pass."""

from __future__ import annotations

import functools
import logging
import threading
from typing import Literal, get_args

import torch

from kvws.errors import ConfigError
from kvws.kernels.dispatch import PAYLOAD_DTYPES, check_dtype, check_name
from kvws.kernels.place import native, reference
from kvws.kernels.rotary import Rotation

Implementation = Literal["auto", "reference", "native"]

logger = logging.getLogger("kvws.kernels")

_choosing = threading.Lock()


def prepare() -> None:
    """Build or load the native implementation now: the first call would wait for the compiler."""
    _automatic()


def place_blocks(
    pool: torch.Tensor,
    pages: torch.Tensor,
    source: torch.Tensor,
    blocks: torch.Tensor,
    rotation: Rotation | None,
    *,
    implementation: Implementation = "auto",
) -> None:
    """Token j of block blocks[i] to its place: pool[tokens·pages[i] + j], rotated.

    The maths is in fp32, rounded once to nearest even. Tokens that do not move keep their bits.
    "auto" is native where a library is cached or can be compiled, and the reference elsewhere.

    Mutates: the rows of `pool` in `pages`, and no others.

    Args:
        pool: [slots, heads, head_dim] float32, float16 or bfloat16, contiguous, in CPU memory:
            one layer's K or V buffer. Its slots are whole pages.
        pages: [n] int64 page numbers, distinct.
        source: [blocks, tokens, heads, head_dim] of pool's dtype, in CPU memory: one layer of the
            host tier. Contiguous within a block. Must not overlap the pool.
        blocks: [n] int64.
        rotation: of n · tokens tokens, in the order of `blocks`; None to copy bits (V).

    Raises:
        ConfigError: the implementation or the dtype is not supported, or the native one cannot
            be built.
        ValueError: a shape, a device, a page or a block contradicts another argument.
    """
    chosen = _resolve(implementation)
    _check_memory(pool, source)
    _check_numbers("pages", pages, pool.shape[0] // source.shape[1])
    _check_numbers("blocks", blocks, source.shape[0])
    if pages.shape != blocks.shape:
        raise ValueError(
            f"pages and blocks must pair up: got {pages.shape[0]} pages and "
            f"{blocks.shape[0]} blocks"
        )
    if rotation is not None:
        _check_rotation(rotation, source, blocks.shape[0] * source.shape[1])
    if chosen == "native":
        native.place_blocks(pool, pages, source, blocks, rotation)
    else:
        reference.place_blocks(pool, pages, source, blocks, rotation)


def _resolve(implementation: Implementation) -> Literal["reference", "native"]:
    check_name(implementation, get_args(Implementation))
    if implementation == "auto":
        return _automatic()
    if implementation == "native":
        native.require()
    return implementation


def _automatic() -> Literal["reference", "native"]:
    with _choosing:
        return _logged_choice()


@functools.cache
def _logged_choice() -> Literal["reference", "native"]:
    try:
        native.require()
    except ConfigError as error:
        logger.info("blocks are placed by the reference implementation: %s", error)
        return "reference"
    logger.info("blocks are placed by the native implementation")
    return "native"


def _check_memory(pool: torch.Tensor, source: torch.Tensor) -> None:
    check_dtype("pool", pool, PAYLOAD_DTYPES)
    if source.dtype != pool.dtype:
        raise ValueError(
            f"source must have pool's dtype: expected {pool.dtype}, got {source.dtype}"
        )
    for name, tensor in (("pool", pool), ("source", source)):
        if tensor.device.type != "cpu":
            raise ValueError(f"{name} must be in CPU memory, got {tensor.device}")
    if source.dim() != 4:
        raise ValueError(
            f"source must be [blocks, tokens, heads, head_dim], got {tuple(source.shape)}"
        )
    _, tokens, heads, head_dim = source.shape
    if pool.dim() != 3 or pool.shape[1:] != source.shape[2:]:
        raise ValueError(
            f"pool must be [slots, heads, head_dim] with source's heads and head_dim: expected "
            f"[slots, {heads}, {head_dim}], got {tuple(pool.shape)}"
        )
    if tokens == 0 or pool.shape[0] % tokens:
        raise ValueError(
            f"pool must be whole pages: expected a multiple of {tokens} slots, "
            f"got {pool.shape[0]}"
        )
    if not pool.is_contiguous() or not source[:1].is_contiguous():
        raise ValueError(
            f"pool must be contiguous, and so must each block of source: got strides "
            f"{pool.stride()} and {source.stride()}"
        )


def _check_numbers(name: str, numbers: torch.Tensor, count: int) -> None:
    if numbers.dim() != 1 or numbers.dtype != torch.int64 or numbers.device.type != "cpu":
        raise ValueError(
            f"{name} must be [n] int64 in CPU memory, got {tuple(numbers.shape)} "
            f"{numbers.dtype} on {numbers.device}"
        )
    if numbers.numel():
        low, high = (int(bound) for bound in torch.aminmax(numbers))
        if low < 0 or high >= count:
            raise ValueError(f"{name} must be 0 to {count - 1}, got {low} to {high}")


def _check_rotation(rotation: Rotation, source: torch.Tensor, tokens: int) -> None:
    if rotation.tokens != tokens:
        raise ValueError(
            f"rotation must have one row per token: expected {tokens}, got {rotation.tokens}"
        )
    if rotation.rotary_dim > source.shape[3]:
        raise ValueError(
            f"rotary_dim must not exceed head_dim: expected at most {source.shape[3]}, "
            f"got {rotation.rotary_dim}"
        )
    if rotation.cos.device.type != "cpu":
        raise ValueError(f"rotation must be in CPU memory, got {rotation.cos.device}")
