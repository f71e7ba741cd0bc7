"""Lower tiers → device. Blocks of a view come up from disk before its request is made; then, for
one batch of requests, the host's copies are placed, and should some still have to be read, the
others meanwhile. The last group of pages goes layer by layer, with the forward pass behind it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvws.blocks.table import Residency
from kvws.errors import HostTierFull, LoadFailed
from kvws.kernels.rotary import RotaryTable
from kvws.tiers.device import DevicePool
from kvws.tiers.lift import Lift, Lifter
from kvws.tiers.repository import Repository
from kvws.tiers.stage_in import PageLoad, fill_pages

_ROOM_WAIT_S = 30.0
"""How long a load waits for the disk to take the blocks that fill the host tier."""


@dataclass(frozen=True)
class QueuedLoad:
    """View pages of one request, and where they go.

    Attributes:
        step: the step that the request belongs to.
        workspace: whose blocks fill them.
        numbers: those blocks, in the order of `pinned`.
        pinned: they stay where they are until the load is released.
    """

    step: str
    workspace: str
    pages: tuple[PageLoad, ...]
    numbers: tuple[int, ...]
    pinned: tuple[Residency, ...]


class Loader:
    """Fills device pages from blocks wherever they are. One thread calls `fill`, any `bring_up`.

    A forward pass waits for its pages, and every session that decodes waits with it. So what can
    take long, the disk, is waited for before.
    """

    def __init__(
        self,
        repository: Repository,
        lifter: Lifter | None,
        pool: DevicePool,
        rotary: Sequence[RotaryTable],
        room_will_come: Callable[[], bool],
    ) -> None:
        """`room_will_come`: whether the disk is about to take blocks off the host tier."""
        self._repository = repository
        self._lifter = lifter
        self._pool = pool
        self._rotary = rotary
        self._room_will_come = room_will_come

    def bring_up(self, workspace: str, numbers: Sequence[int]) -> None:
        """Wait until blocks of an open step have host copies, as far as there is room for them.

        A block that cannot be read is missing afterwards.
        """
        with suppress(LoadFailed):
            for lift in self._lift(workspace, numbers):
                lift.done.exception()

    def fill(self, loads: Sequence[QueuedLoad], layer_done: Callable[[int], None]) -> None:
        """Fill the pages of all loads; `layer_done` as in `fill_pages`.

        Raises:
            LoadFailed: bytes are gone, or the host has no room to read them into.
        """
        lifts = [lift for load in loads for lift in self._lift(load.workspace, load.numbers)]
        arrival = {entry: at for at, lift in enumerate(lifts) for entry in lift.entries}
        completed_by: list[list[PageLoad]] = [[] for _ in lifts]
        ready: list[PageLoad] = []
        for page in (page for load in loads for page in load.pages):
            last = max(arrival.get(piece.block, -1) for piece in page.slices)
            (ready if last < 0 else completed_by[last]).append(page)
        arrived = 0
        while True:
            while arrived < len(lifts) and (lifts[arrived].done.done() or not ready):
                _wait_for(lifts[arrived], lifts)
                ready += completed_by[arrived]
                arrived += 1
            is_last_group = arrived == len(lifts)
            self._place(ready, layer_done if is_last_group else _not_yet)
            if is_last_group:
                return
            ready = []

    def _place(self, pages: Sequence[PageLoad], layer_done: Callable[[int], None]) -> None:
        if any(piece.block.slot is None for page in pages for piece in page.slices):
            raise LoadFailed("a promised page lost its bytes while it was loaded")
        fill_pages(pages, self._repository.host, self._pool, self._rotary, layer_done)

    def _lift(self, workspace: str, numbers: Sequence[int]) -> list[Lift]:
        """Start to bring up what has no host copy.

        Raises:
            LoadFailed: there is no room for it.
        """
        if self._lifter is None:
            return []
        deadline = time.monotonic() + _ROOM_WAIT_S
        while True:
            try:
                return self._lifter.lift(workspace, numbers)
            except HostTierFull as error:
                if not self._room_will_come() or time.monotonic() > deadline:
                    raise LoadFailed(f"a view cannot be read from disk: {error}") from error
                time.sleep(0.01)


def _wait_for(lift: Lift, all_lifts: Sequence[Lift]) -> None:
    """Wait for a lift. If it fails, wait for all: the caller computes every lost block again
    before it tries once more, so that no attempt stumbles over the next one."""
    try:
        lift.done.result()
    except Exception as error:
        for other in all_lifts:
            other.done.exception()
        raise LoadFailed(f"a promised page cannot be read from disk: {error}") from error


def _not_yet(layer: int) -> None:
    """The pages of later groups still lack this layer."""
