"""Scores of blocks by what attention would see of them at their distance."""

from kvws.kernels.rotated_scores.api import rotated_scores

__all__ = ["rotated_scores"]
