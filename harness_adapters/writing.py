"""Config files of clients: written where there is none, never over a user's own."""

from __future__ import annotations

import os
from pathlib import Path

from kvws.errors import ConfigError


def write_new(path: Path, text: str) -> None:
    """Create a file, readable by its owner alone: it may hold a key.

    Raises:
        ConfigError: it exists; the hint is what to merge into it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise ConfigError(
            f"{path} exists and is left as it is", hint=f"merge this into it:\n{text}"
        ) from error
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
