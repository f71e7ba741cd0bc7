"""A killed process loses nothing that was acknowledged."""

from __future__ import annotations

import subprocess
import sys


def kill_loop(*options: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: it forks, which a process with threads must not."""
    command = [sys.executable, "-m", "tests.store.campaigns.kill_loop", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    print(done.stdout, done.stderr)
    return done


def test_kills_at_random_times() -> None:
    done = kill_loop("--count", "60", "--seed", "1")
    assert done.returncode == 0 and " 0 violations" in done.stdout


def test_control_an_acknowledgement_before_the_put_is_caught() -> None:
    done = kill_loop("--count", "200", "--seed", "1", "--early-acknowledgement", "1")
    assert done.returncode == 1 and "VIOLATION" in done.stdout
