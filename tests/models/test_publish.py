"""A published folder is complete or absent, whoever publishes it and whenever it is killed."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from kvws.models.publish import publish_once


def fill_slowly(target: Path) -> None:
    (target / "first").write_text(str(os.getpid()))
    with (target.parent / "fills").open("a") as log:
        log.write(f"{os.getpid()}\n")
    time.sleep(0.3)
    (target / "second").write_text(str(os.getpid()))


def publish(folder: Path, locks: bool) -> None:
    if not locks:

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOLCK, "no locks here")

        fcntl.flock = refuse
    publish_once(folder, fill_slowly)


def leftovers(folder: Path) -> list[Path]:
    return list(folder.parent.glob(".*.new-*"))


@pytest.mark.parametrize("locks", [True, False], ids=["locks", "no-locks"])
def test_processes_that_race_all_succeed(tmp_path: Path, locks: bool) -> None:
    folder = tmp_path / "folder"
    context = multiprocessing.get_context("fork")
    racers = [context.Process(target=publish, args=(folder, locks)) for _ in range(3)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert [racer.exitcode for racer in racers] == [0, 0, 0]
    assert (folder / "first").read_text() == (folder / "second").read_text()
    assert not leftovers(folder)
    if locks:
        assert len((tmp_path / "fills").read_text().split()) == 1


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    publish_once(folder, fill_slowly)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("interruption", [RuntimeError, KeyboardInterrupt, OSError])
def test_an_interruption_leaves_nothing(tmp_path: Path, interruption: type[BaseException]) -> None:
    folder = tmp_path / "folder"

    def fail_midway(target: Path) -> None:
        (target / "first").write_text("half")
        raise interruption

    with pytest.raises(interruption):
        publish_once(folder, fail_midway)
    assert not folder.exists()
    assert not leftovers(folder)


def test_a_killed_process_is_cleaned_up_after(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    context = multiprocessing.get_context("fork")
    victim = context.Process(target=publish, args=(folder, True))
    victim.start()
    deadline = time.monotonic() + 10
    while not (tmp_path / "fills").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    assert not folder.exists()
    assert leftovers(folder)

    publish_once(folder, fill_slowly)
    assert (folder / "second").exists()
    assert not leftovers(folder)
