"""What `kvws serve` prints once it is ready: how to point each client at it."""

from __future__ import annotations

from kvws.harness_adapters.address import ServerAddress
from kvws.harness_adapters.recognise import launch

_CLIENTS = {
    "Claude Code": "claude",
    "OpenHands": "openhands",
    "opencode": "opencode",
    "Codex": "codex",
    "any other": "your-client",
}


def paste_lines(address: ServerAddress) -> list[str]:
    """Lines for a terminal: per client a heading, and a command to paste into a shell.

    The command holds the key, where there is one: whoever reads the terminal can use the server.
    """
    lines: list[str] = []
    for name, program in _CLIENTS.items():
        lines += [f"{name}:", f"  {launch([program], address).shell_line()}"]
    return lines
