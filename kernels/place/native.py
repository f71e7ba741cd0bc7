"""Placing blocks in C: one pass over the bytes, without the interpreter's lock."""

from __future__ import annotations

import ctypes
import functools
import threading
from pathlib import Path

import torch

from kvws.errors import ConfigError
from kvws.kernels.place.build import cache_folder, find_compiler, load_library
from kvws.kernels.rotary import Rotation

SOURCE = Path(__file__).with_name("place.c")

ELEMENTS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""The element types as place.c numbers them."""

_POINTER, _COUNT, _FLAG = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_COPY = [_POINTER, _POINTER, _POINTER, _COUNT, _POINTER, _COUNT]

_loading = threading.Lock()


def require() -> None:
    """Load the library, or build it; later calls know the outcome of the first.

    Raises:
        ConfigError: it cannot be built.
    """
    _library()


def place_blocks(
    pool: torch.Tensor,
    pages: torch.Tensor,
    source: torch.Tensor,
    blocks: torch.Tensor,
    rotation: Rotation | None,
) -> None:
    """Mutates: the rows of `pool` in `pages`. Arguments as in `kvws.kernels.place.place_blocks`.

    They have been checked: a page or block out of bounds would be written or read regardless.
    """
    library = _library()
    count, (_, tokens, heads, head_dim) = blocks.shape[0], source.shape
    pages, blocks = pages.contiguous(), blocks.contiguous()
    stride_bytes = source.stride(0) * source.element_size()
    moves = (
        pool.data_ptr(),
        pages.data_ptr(),
        source.data_ptr(),
        stride_bytes,
        blocks.data_ptr(),
        count,
    )
    if rotation is None or rotation.identity:
        library.copy_blocks(*moves, tokens * heads * head_dim * source.element_size())
        return
    cos, sin = rotation.cos.contiguous(), rotation.sin.contiguous()
    library.rotate_blocks(
        *moves,
        tokens,
        heads,
        head_dim,
        ELEMENTS[source.dtype],
        cos.data_ptr(),
        sin.data_ptr(),
        cos.shape[1],
        rotation.interleaved,
    )


def _library() -> ctypes.CDLL:
    with _loading:
        outcome = _outcome()
    if isinstance(outcome, ConfigError):
        raise ConfigError(outcome.args[0], hint=outcome.hint)
    return outcome


@functools.cache
def _outcome() -> ctypes.CDLL | ConfigError:
    try:
        library = load_library(SOURCE, cache_folder(), find_compiler())
    except ConfigError as error:
        return error
    library.copy_blocks.argtypes = [*_COPY, _COUNT]
    library.copy_blocks.restype = None
    library.rotate_blocks.argtypes = [
        *_COPY, _COUNT, _COUNT, _COUNT, _FLAG, _POINTER, _POINTER, _COUNT, _FLAG
    ]  # fmt: skip
    library.rotate_blocks.restype = None
    return library
