"""The ranks' shares of scores, put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvws.engine.protocol import Scores


def scores_of_ranks(replies: Sequence[Mapping[str, Any]]) -> Scores:
    """Scores of the whole model.

    Args:
        replies: of each rank to the operation `score`.
    """
    rows = min(reply["rows"] for reply in replies)
    if rows == 0:
        return Scores(0, {})
    by_signal = {
        name: np.sum(
            [np.frombuffer(reply["scores"][name], dtype=np.float32) for reply in replies], axis=0
        )
        for name in replies[0]["scores"]
    }
    if "mean-k" in by_signal:  # the paper averages over layers and heads
        by_signal["mean-k"] /= np.float32(sum(reply["heads"] for reply in replies))
    return Scores(rows, by_signal)


def runs_of_ranks(replies: Sequence[bytes | None]) -> npt.NDArray[np.float32] | None:
    """Scores of runs of the whole model; None if a rank has none.

    Args:
        replies: of each rank to the operation `score_runs`.
    """
    shares = [np.frombuffer(reply, dtype=np.float32) for reply in replies if reply is not None]
    return np.sum(shares, axis=0) if len(shares) == len(replies) else None
