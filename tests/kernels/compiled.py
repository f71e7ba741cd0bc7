"""Every Triton kernel, as the GPU gets it: with the types and constants of a launch.

No GPU is needed to compile for one. Sizes are those of today's models: a head size of 128, blocks
of 32 tokens, bf16 pools; and the awkward ones where they take other branches.
"""

# Kernels have no types of their own.
# pyright: basic

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvws.kernels.mean_k.triton import mean_rotated_kernel
from kvws.kernels.quant.triton import (
    dequantise_fp8_kernel,
    dequantise_kernel,
    quantise_fp8_kernel,
    quantise_kernel,
)
from kvws.kernels.rerope.triton import rotate_kernel
from kvws.kernels.rotated_scores import triton as rotated
from kvws.kernels.score import triton as mean_k
from kvws.kernels.token_scores import triton as tokens


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched.

    Attributes:
        types: of its arguments; i32 where absent.
        constants: its constexpr arguments.
        num_warps: Triton's default unless the launch says otherwise.
        spilled_bytes_max: what a thread may write to memory for want of registers.
    """

    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    spilled_bytes_max: int = 0

    @property
    def signature(self) -> dict[str, str]:
        return {
            argument: "constexpr"
            if argument in self.constants
            else self.types.get(argument, "i32")
            for argument in self.kernel.arg_names
        }


_TABLES = {"cos": "*fp32", "sin": "*fp32"}
_WHOLE = {"HEAD_DIM": 128, "HALF": 64, "INTERLEAVED": False, "BLOCK_PAIRS": 64, "BLOCK_REST": 0}
_PART = {"HEAD_DIM": 128, "HALF": 48, "INTERLEAVED": True, "BLOCK_PAIRS": 64, "BLOCK_REST": 32}

_POOL = {"x": "*bf16", "out": "*bf16", "slots": "*i64", **_TABLES}
_KEYS = {"k": "*bf16", "out": "*fp32", **_TABLES}

_MEAN_K = {
    "queries": "*fp32",
    "tile": "*fp16",
    "candidates": "*u8",
    "normaliser": "*fp32",
    "partial": "*fp32",
    "scale": "fp32",
}
_MEAN_K_SIZES = {
    "HEAD_DIM": 128,
    "BLOCK_DIM": 128,
    "BLOCK_ROWS": mean_k.BLOCK_ROWS,
    "BLOCK_BLOCKS": mean_k.BLOCK_BLOCKS,
}

_ROTATED = {
    "rows": "*fp32",
    "means": "*fp16",
    "variances": "*fp16",
    "layers": "*i64",
    "blocks": "*i64",
    "distances": "*i64",
    "normaliser": "*fp32",
    "partial": "*fp32",
    **_TABLES,
}
_OF_QUERIES_BYTES = 128
"""Pieces of the queries that stay the same all through the loop."""

_ROTATED_SIZES = {"BLOCK_ROWS": rotated.BLOCK_ROWS, "BLOCK_BLOCKS": rotated.BLOCK_BLOCKS}

_TOKENS = {"rows": "*fp32", "scales": "*fp16", "blocks": "*i64", "out": "*fp32"}
_TOKENS_SIZES = {"BLOCK_KEYS": tokens.BLOCK_KEYS, "BLOCK_ROWS": tokens.BLOCK_ROWS}
_TOKENS_OF_BLOCK = {"KEYS": 32, "KEYS_OF_BLOCK": 32, "SCALED": True, **_TOKENS_SIZES}
_MEANS_OF_BLOCK = {"KEYS": 1, "KEYS_OF_BLOCK": 1, "SCALED": False, **_TOKENS_SIZES}

_CODED = {"x": "*bf16", "out": "*bf16", "codes": "*u8", "scales": "*i16"}
_CODED_KEYS = {"TOKENS": 32, "RUN": 128, "RUNS": 1, "KEYS": True, "BLOCK_RUN": 128}
_CODED_VALUES = {"TOKENS": 32, "RUN": 32, "RUNS": 4, "KEYS": False, "BLOCK_RUN": 32}
_INT8 = {"PARTS": 1, "BLOCK_PART": 32}
_INT4 = {"PARTS": 2, "BLOCK_PART": 16}
_TO_INT8 = {**_INT8, "LEVELS": 255, "BLOCK_TOKENS": 32}
_TO_INT4 = {**_INT4, "LEVELS": 15, "BLOCK_TOKENS": 32}
_FP8 = {"TOKENS": 32, "HEAD_DIM": 128, "BLOCK_TOKENS": 32, "BLOCK_DIM": 128}

LAUNCHES = {
    "rerope scatter": Launch(
        rotate_kernel, _POOL, {**_WHOLE, "SCATTER": True, "BLOCK_TOKENS": 16}
    ),
    "rerope partial": Launch(
        rotate_kernel, _POOL, {**_PART, "SCATTER": False, "BLOCK_TOKENS": 16}
    ),
    "mean": Launch(mean_rotated_kernel, _KEYS, {**_WHOLE, "TOKENS": 32, "BLOCK_TOKENS": 32}),
    "mean partial": Launch(
        mean_rotated_kernel, _KEYS, {**_PART, "TOKENS": 32, "BLOCK_TOKENS": 32}
    ),
    "mean-k normalise": Launch(mean_k.normalise_kernel, _MEAN_K, _MEAN_K_SIZES, mean_k.NUM_WARPS),
    "mean-k accumulate": Launch(
        mean_k.accumulate_kernel, _MEAN_K, _MEAN_K_SIZES, mean_k.NUM_WARPS
    ),
    "rotated normalise": Launch(
        rotated.normalise_kernel,
        _ROTATED,
        {**_WHOLE, **_ROTATED_SIZES},
        spilled_bytes_max=_OF_QUERIES_BYTES,
    ),
    "rotated accumulate": Launch(
        rotated.accumulate_kernel, _ROTATED, {**_WHOLE, **_ROTATED_SIZES}
    ),
    "rotated normalise partial": Launch(
        rotated.normalise_kernel,
        _ROTATED,
        {**_PART, **_ROTATED_SIZES},
        spilled_bytes_max=_OF_QUERIES_BYTES,
    ),
    "rotated accumulate partial": Launch(
        rotated.accumulate_kernel, _ROTATED, {**_PART, **_ROTATED_SIZES}
    ),
    "tokens int8": Launch(
        tokens.largest_logits_kernel,
        {**_TOKENS, "codes": "*i8"},
        {**_TOKENS_OF_BLOCK, "WIDTH": 128, "PARTS": 1, "BLOCK_WIDTH": 128},
    ),
    "tokens int4": Launch(
        tokens.largest_logits_kernel,
        {**_TOKENS, "codes": "*u8"},
        {**_TOKENS_OF_BLOCK, "WIDTH": 64, "PARTS": 2, "BLOCK_WIDTH": 64},
    ),
    "tokens means": Launch(
        tokens.largest_logits_kernel,
        {**_TOKENS, "codes": "*fp16"},
        {**_MEANS_OF_BLOCK, "WIDTH": 128, "PARTS": 1, "BLOCK_WIDTH": 128},
    ),
    "quantise int8 keys": Launch(quantise_kernel, _CODED, {**_CODED_KEYS, **_TO_INT8}),
    "quantise int4 keys": Launch(quantise_kernel, _CODED, {**_CODED_KEYS, **_TO_INT4}),
    "quantise int4 values": Launch(quantise_kernel, _CODED, {**_CODED_VALUES, **_TO_INT4}),
    "quantise fp8": Launch(quantise_fp8_kernel, _CODED, _FP8),
    "dequantise int8 keys": Launch(dequantise_kernel, _CODED, {**_CODED_KEYS, **_INT8}),
    "dequantise int4 values": Launch(dequantise_kernel, _CODED, {**_CODED_VALUES, **_INT4}),
    "dequantise fp8": Launch(dequantise_fp8_kernel, _CODED, _FP8),
}
