"""Quantisation of KV blocks at rest: raw keys per channel, values per token."""

from kvws.kernels.quant.api import dequantise, quantise
from kvws.kernels.quant.formats import Format, Side, codes_shape, scales_shape

__all__ = ["Format", "Side", "codes_shape", "dequantise", "quantise", "scales_shape"]
