"""`kvws serve` as a program of its own: started, killed and interrupted as a user would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
_START_S = 200.0


class ServeProcess:
    """A running server in a process group of its own.

    Attributes:
        base_url: where it answers.
    """

    def __init__(self, process: subprocess.Popen[bytes], base_url: str, log: Path) -> None:
        self.base_url = base_url
        self._process = process
        self._log = log

    @property
    def said(self) -> str:
        """What it printed so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def kill(self) -> None:
        """Kill the server and its engine at once, as a crash of the machine would."""
        _signal_all(self._process, signal.SIGKILL)
        self._process.wait()

    def interrupt(self, *, timeout_s: float) -> int:
        """Press Ctrl-C: a terminal tells every process of the group. Returns the exit status.

        Raises:
            subprocess.TimeoutExpired: the server does not end.
        """
        _signal_all(self._process, signal.SIGINT)
        return self._process.wait(timeout_s)


@contextmanager
def serve_process(folder: Path, *arguments: str) -> Generator[ServeProcess]:
    """Start `kvws serve` on a free port and wait until it answers.

    Args:
        folder: for its log and its ready file.
    """
    ready, log = folder / "ready.json", folder / "serve.log"
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "kvws", "serve", "--port", "0", "--ready-file", str(ready)]
    with log.open("wb") as output:
        process = _start([*command, *arguments], output)
    try:
        yield ServeProcess(process, _address(process, ready, log), log)
    finally:
        _signal_all(process, signal.SIGKILL)
        process.wait()


def _start(command: list[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "KVWS_API_KEY": ""},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _address(process: subprocess.Popen[bytes], ready: Path, log: Path) -> str:
    deadline = time.monotonic() + _START_S
    while not ready.exists():
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, f"it does not start: {log.read_text()[-3000:]}"
        time.sleep(0.1)
    return str(json.loads(ready.read_text())["base_url"])


def _signal_all(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return
