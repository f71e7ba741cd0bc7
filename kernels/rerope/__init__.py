"""Move the keys of tokens from the positions they were stored at to those they will serve."""

from kvws.kernels.rerope.api import rotate, scatter_rotated
from kvws.kernels.rotary import Rotation, rotation_between

__all__ = ["Rotation", "rotate", "rotation_between", "scatter_rotated"]
