"""Scores of blocks for a query, by the published Mean-K rule."""

from kvws.kernels.score.api import mean_k_scores

__all__ = ["mean_k_scores"]
