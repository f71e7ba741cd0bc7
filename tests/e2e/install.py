"""Install clients at their pinned versions: `python -m tests.e2e.install claude codex …`.

Nothing global is touched: npm packages go below one folder with `--prefix`, OpenHands into a
virtual environment of its own. What is there already stays.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

from tests.e2e.clients import CLIENTS, OPENHANDS, Client, clients_folder

UV = "uv==0.13.9"
_NEWEST_MINOR = 14


def install(client: Client) -> None:
    if client.is_installed:
        return
    print(f"installing {client.name} {client.version} into {client.folder}", flush=True)
    shutil.rmtree(client.folder, ignore_errors=True)
    client.folder.mkdir(parents=True)
    if client is OPENHANDS:
        _install_openhands(client)
    else:
        quietly = ("--no-fund", "--no-audit", "--no-update-notifier", "--loglevel", "error")
        _run("npm", "install", *quietly, "--prefix", client.folder, *client.packages)
    client.stamp.touch()


def _install_openhands(client: Client) -> None:
    """By uv, which resolves its requirements in seconds; pip needs a quarter of an hour."""
    environment = client.folder / "venv"
    uv = _uv()
    _run(uv, "venv", "--quiet", "--python", _python(), environment)
    _run(uv, "pip", "install", "--quiet", "--python", environment, *client.packages)


def _uv() -> str:
    found = shutil.which("uv")
    if found:
        return found
    folder = clients_folder() / "uv"
    if not (folder / "bin" / "uv").exists():
        venv.create(folder, with_pip=True)
        _run(folder / "bin" / "pip", "install", "--quiet", UV)
    return str(folder / "bin" / "uv")


def _python() -> str:
    """A Python that OpenHands runs on (3.12 or newer); uv fetches one where there is none."""
    if sys.version_info >= (3, 12):
        return sys.executable
    pyenv = Path.home() / ".pyenv" / "versions"
    for minor in range(12, _NEWEST_MINOR):
        found = shutil.which(f"python3.{minor}")
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
            return found
        for python in sorted(pyenv.glob(f"3.{minor}.*/bin/python")):
            return str(python)
    return "3.12"


def _run(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True)


def main(names: list[str]) -> None:
    wanted = CLIENTS if not names or "all" in names else names
    for name in wanted:
        if name not in CLIENTS:
            sys.exit(f"e2e: there is no client {name!r}; known: {', '.join(CLIENTS)}, all")
    for name in wanted:
        install(CLIENTS[name])


if __name__ == "__main__":
    main(sys.argv[1:])
