"""What starting a client takes besides its own command."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

KEY_VARIABLE = "KVWS_API_KEY"
"""Where clients whose config names a variable find the key."""


@dataclass(frozen=True)
class Launch:
    """A client's command, changed so that it asks our server.

    Attributes:
        command: program and arguments. Never holds the API key: other users can read it.
        environment: variables to set.
        unset: variables that would send the client elsewhere.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    unset: tuple[str, ...] = ()

    def environment_over(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The whole environment of the client's process."""
        kept = {name: value for name, value in inherited.items() if name not in self.unset}
        return {**kept, **self.environment}

    def shell_line(self, token: str) -> str:
        """The same as one line for a shell that has the token in $KVWS_API_KEY."""
        unset = [word for name in self.unset for word in ("-u", name)]
        assignments = [
            f'{name}="${KEY_VARIABLE}"' if value == token else shlex.quote(f"{name}={value}")
            for name, value in self.environment.items()
        ]
        return " ".join(["env", *unset, *assignments, shlex.join(self.command)])


def with_arguments(command: Sequence[str], arguments: Sequence[str]) -> tuple[str, ...]:
    """A command with arguments in front of its own: a client's global options."""
    return (command[0], *arguments, *command[1:])
