"""Compute threads beside the engine's own."""

from __future__ import annotations

import torch


def leave_cores_to_the_forward_pass() -> None:
    """Let this thread, and threads started later, compute on one core.

    OpenMP keeps a team of workers per thread that ever computed in parallel. With more workers
    than cores they stop spinning between operations, and every operation of the forward pass
    then waits for its own to wake up. The scheduler's thread keeps the team it already has.
    """
    torch.set_num_threads(1)
