"""Shared by the end-to-end tests."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.clients import Client
from tests.e2e.scripts import NEW, OLD


def require(client: Client) -> None:
    """Skip a client that was not asked for, or is not installed."""
    asked = os.environ.get("KVWS_E2E", "").split()
    if client.name not in asked and "all" not in asked:
        pytest.skip(f"takes its time; run scripts/e2e {client.name}")
    if not client.is_installed:
        pytest.skip(f"not installed; run scripts/e2e {client.name}")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A git repository with a greeting to change and a check that fails until it is."""
    folder = tmp_path / "repo"
    folder.mkdir()
    (folder / "greeting.py").write_text(f'GREETING = "{OLD}"\n')
    check = f'from greeting import GREETING\n\nassert GREETING == "{NEW}"\nprint("check passed")\n'
    (folder / "check.py").write_text(check)
    author = ("-c", "user.name=e2e", "-c", "user.email=e2e@localhost")
    for arguments in (("init", "-q"), ("add", "."), (*author, "commit", "-qm", "Begin")):
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
        subprocess.run(["git", *arguments], cwd=folder, env=environment, check=True)
    return folder
