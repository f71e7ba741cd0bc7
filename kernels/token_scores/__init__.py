"""Scores of blocks by the tokens of theirs that a query's heads look for."""

from kvws.kernels.token_scores.api import largest_logits, token_scores
from kvws.kernels.token_scores.formats import TokenFormat, decode, format_of

__all__ = ["TokenFormat", "decode", "format_of", "largest_logits", "token_scores"]
