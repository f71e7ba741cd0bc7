"""Fill pages of a KV pool in CPU memory from blocks in host memory, keys rotated on the way."""

from kvws.kernels.place.api import place_blocks, prepare

__all__ = ["place_blocks", "prepare"]
