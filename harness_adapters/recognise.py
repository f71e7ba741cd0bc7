"""Which adapter a command needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from kvws.harness_adapters import claude_code, codex, opencode, openhands, other
from kvws.harness_adapters.address import ServerAddress
from kvws.harness_adapters.launching import Launch

_BY_PROGRAM = {
    "claude": claude_code.launch,
    "codex": codex.launch,
    "opencode": opencode.launch,
    "openhands": openhands.launch,
}


def launch(command: Sequence[str], address: ServerAddress) -> Launch:
    """How to start a client, told by its program's name without folder and suffix.

    Args:
        command: program and arguments; at least the program.
    """
    adapter = _BY_PROGRAM.get(PurePath(command[0]).stem.lower(), other.launch)
    return adapter(command, address)
