"""A process that puts and drops on real files is killed at random times, again and again.

One parent forks a worker per round (it holds no threads), reads from a pipe what the worker began
and what the store acknowledged, kills it, opens the store and compares. The store lives on over
all rounds, so recoveries of recoveries are among them.
"""

from __future__ import annotations

import os
import random
import select
import signal
import struct
import tempfile
import time
import traceback
from pathlib import Path

from kvws.store.posix import PosixStorage
from tests.store.campaigns.oracle import Oracle, Violation, content, open_store
from tests.store.campaigns.report import Report, arguments, end_when_stuck, finish

MAX_LIVE_BLOCKS = 24
MAX_LIFE_S = 0.06
COMPACT_SHARE = 0.05
REINDEX_SHARE = 0.1

_ENTRY = struct.Struct("<cqq")
"""One line of the pipe: what (begin, acknowledged), block number, version (-1: dropped)."""
_MEMBER, _BEGIN, _DONE = b"m", b"b", b"d"


class KillLoop:
    """The campaign.

    Args:
        early_acknowledgement: planted fault: the worker acknowledges before it puts.
    """

    def __init__(self, seed: int, folder: Path, *, early_acknowledgement: bool = False) -> None:
        self.report = Report("kills", seed, "kills")
        self._storage = PosixStorage(folder)
        self._folder = folder / "rank-0"
        self._early_acknowledgement = early_acknowledgement
        self._chance = random.Random(seed)
        self._oracle = Oracle()

    def run(self, kills: int) -> Report:
        for round_number in range(kills):
            end_when_stuck()
            self._kill_one(self._chance.getrandbits(64))
            try:
                store = open_store(self._storage, self._folder)
                self.report.count("operations found half done", bool(self._oracle.in_flight))
                self._oracle.check_restart(store)
                store.close()
                held = self._oracle.settled.values()
                self._oracle.ever = {offered.page_hash: offered for offered in held}
            except Exception as error:
                self.report.violations.append(
                    f"round {round_number}: {type(error).__name__}: {error}"
                )
                break
        return self.report

    def _kill_one(self, seed: int) -> None:
        reading, writing = os.pipe()
        worker = os.fork()
        if worker == 0:
            os.close(reading)
            _work_until_killed(self, seed, writing)
        os.close(writing)
        deadline = time.monotonic() + self._chance.uniform(0, MAX_LIFE_S)
        killed, text = False, b""
        while True:
            rest_s = max(0.0, deadline - time.monotonic())
            if not killed and not select.select([reading], [], [], rest_s)[0]:
                os.kill(worker, signal.SIGKILL)
                killed = True
            piece = os.read(reading, 1 << 16)
            text += piece
            if not piece:
                break
        os.close(reading)
        _, status = os.waitpid(worker, 0)
        self.report.count("kills")
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            raise Violation(f"the worker ended by itself: status {status}")
        self._replay(text)

    def _replay(self, text: bytes) -> None:
        """Bring the oracle to where the worker was."""
        whole = len(text) - len(text) % _ENTRY.size
        batch: dict[int, int] = {}
        for what, number, version in _ENTRY.iter_unpack(text[:whole]):
            if what == _MEMBER:
                batch[number] = version
            elif what == _BEGIN:
                self._oracle.begin(
                    {
                        member: None if chosen < 0 else self._oracle.offer(member, chosen)
                        for member, chosen in batch.items()
                    }
                )
                batch = {}
            else:
                self._oracle.acknowledge()
                self.report.count("acknowledged operations")

    def work(self, seed: int, pipe: int) -> None:
        """Put, replace, drop and compact for ever (in the worker)."""
        chance, oracle = random.Random(seed), self._oracle
        store = open_store(self._storage, self._folder)
        while True:
            live = sorted(oracle.settled)
            if chance.random() < COMPACT_SHARE:
                store.compact()
            if chance.random() < REINDEX_SHARE:
                store.close()
                store = open_store(self._storage, self._folder, other_rows=True)
            if len(live) > MAX_LIVE_BLOCKS:
                numbers = chance.sample(live, chance.randint(1, len(live)))
                chosen = dict.fromkeys(numbers, -1)
            else:
                numbers = [oracle.next_number + i for i in range(chance.randint(1, 3))]
                numbers += chance.sample(live, min(len(live), chance.randint(0, 1)))
                chosen = {number: oracle.versions + 1 for number in numbers}
            oracle.begin(
                {n: None if v < 0 else oracle.offer(n, v) for n, v in chosen.items()}
            )
            _tell(pipe, *((_MEMBER, n, v) for n, v in chosen.items()), (_BEGIN, 0, 0))
            if self._early_acknowledgement:
                _tell(pipe, (_DONE, 0, 0))
            if len(live) > MAX_LIVE_BLOCKS:
                store.drop(numbers)
            else:
                store.put([content(n, v).new_block(store.shape) for n, v in chosen.items()])
            if not self._early_acknowledgement:
                _tell(pipe, (_DONE, 0, 0))
            oracle.acknowledge()


def _work_until_killed(loop: KillLoop, seed: int, pipe: int) -> None:
    """The worker's life; nothing of the parent's runs in it, not even on an error."""
    try:
        loop.work(seed, pipe)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _tell(pipe: int, *entries: tuple[bytes, int, int]) -> None:
    os.write(pipe, b"".join(_ENTRY.pack(*entry) for entry in entries))


def main() -> None:
    options = arguments("kills", count=10_000, early_acknowledgement=0)
    with tempfile.TemporaryDirectory(prefix="kvws-kills-") as folder:
        early = bool(options.early_acknowledgement)
        loop = KillLoop(options.seed, Path(folder), early_acknowledgement=early)
        finish(loop.run(options.count))


if __name__ == "__main__":
    main()
