"""Compute threads beside the engine's own."""

from __future__ import annotations

import os
import sys
import threading

import torch

_NICER_BY = 5
"""On a core that both want, the forward pass gets three quarters."""

_thread = threading.local()


def leave_cores_to_the_forward_pass() -> None:
    """Let this thread, and threads started later, compute on one core.

    OpenMP keeps a team of workers per thread that ever computed in parallel. With more workers
    than cores they stop spinning between operations, and every operation of the forward pass
    then waits for its own to wake up. The scheduler's thread keeps the team it already has.
    """
    torch.set_num_threads(1)


def give_way_to_the_forward_pass() -> None:
    """Let this thread compute what the forward pass leaves, for as long as it lives.

    A score takes a core for a while; where there is none to spare, sessions that decode meanwhile
    would each get every other token late.
    """
    if sys.platform != "linux" or getattr(_thread, "gives_way", False):
        return  # elsewhere niceness is a whole process's
    _thread.gives_way = True
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + _NICER_BY)
