"""The Mean-K index entry of a block: the mean of its position-independent keys."""

from kvws.kernels.mean_k.api import mean_raw_k, mean_rotated, raw_rotation

__all__ = ["mean_raw_k", "mean_rotated", "raw_rotation"]
