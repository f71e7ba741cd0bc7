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

    The key is not in them: terminals and logs remember. Where the server asks for one, the shell
    must have it in $KVWS_API_KEY.
    """
    hidden = address.token if address.api_key else ""
    lines: list[str] = []
    for name, program in _CLIENTS.items():
        lines += [f"{name}:", f"  {launch([program], address).shell_line(hidden)}"]
    return lines
