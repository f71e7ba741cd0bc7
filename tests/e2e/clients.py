"""The real clients: where they are installed, and how they are run without a trace of the user.

Each run has a home of its own, an environment built from nothing, and no way out but loopback:
every proxy that a client may ask points at a closed port.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 240
_NOWHERE = "http://127.0.0.1:9"


def clients_folder() -> Path:
    """$KVWS_CLIENTS, or a folder of the user's cache."""
    named = os.environ.get("KVWS_CLIENTS")
    return Path(named) if named else Path.home() / ".cache" / "kvws" / "clients"


@dataclass(frozen=True)
class Client:
    """One client at one version.

    Attributes:
        packages: what is installed, as its package manager spells it.
        program: the executable, below `folder`.
    """

    name: str
    version: str
    packages: tuple[str, ...]
    program: str

    @property
    def folder(self) -> Path:
        return clients_folder() / f"{self.name}-{self.version}"

    @property
    def executable(self) -> Path:
        return self.folder / self.program

    @property
    def stamp(self) -> Path:
        """Written once everything is installed."""
        return self.folder / "installed"

    @property
    def is_installed(self) -> bool:
        return self.stamp.exists() and self.executable.exists()


def _npm(name: str, package: str, version: str, program: str) -> Client:
    return Client(name, version, (f"{package}@{version}",), f"node_modules/.bin/{program}")


CLAUDE = _npm("claude", "@anthropic-ai/claude-code", "2.1.332", "claude")
CODEX = _npm("codex", "@openai/codex", "0.171.0", "codex")
OPENCODE = _npm("opencode", "opencode-ai", "1.18.33", "opencode")
OPENHANDS = Client(
    "openhands",
    "1.58.2",
    ("openhands-sdk==1.58.2", "openhands-tools==1.58.2"),
    "venv/bin/python",
)
CLIENTS = {client.name: client for client in (CLAUDE, CODEX, OPENCODE, OPENHANDS)}


@dataclass(frozen=True)
class Finished:
    """A client's run."""

    code: int
    out: str
    err: str


def bare_environment(home: Path) -> dict[str, str]:
    """What every program needs, and a home that nobody used before."""
    temporary = home / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    proxies = {name: _NOWHERE for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")}
    return {
        "HOME": str(home),
        "TMPDIR": str(temporary),
        "CLAUDE_CODE_TMPDIR": str(temporary),
        "PATH": os.pathsep.join([*_node_folder(), "/usr/local/bin", "/usr/bin", "/bin"]),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "NO_PROXY": "127.0.0.1,localhost",
        **proxies,
        **{name.lower(): value for name, value in proxies.items()},
        "no_proxy": "127.0.0.1,localhost",
    }


def _node_folder() -> list[str]:
    node = shutil.which("node")
    return [str(Path(node).parent)] if node else []


def run_client(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    *,
    timeout_s: float = TIMEOUT_S,
) -> Finished:
    """Run a client to its end; whatever it started ends with it.

    Raises:
        AssertionError: it took too long.
    """
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _kill_all(process)
        out, err = process.communicate()
        said = f"{out[-3000:]}\n{err[-3000:]}"
        raise AssertionError(f"no end after {timeout_s:.0f} s:\n{said}") from None
    finally:
        _kill_all(process)
    return Finished(process.returncode, out, err)


def _kill_all(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
