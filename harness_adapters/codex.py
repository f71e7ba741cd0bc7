"""Codex: a model provider, in its config file or as overrides on its command line.

The key is read from the environment variable KVWS_API_KEY; the file and the command only name it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from kvws.harness_adapters.address import MODEL_NAME, STALL_S, ServerAddress
from kvws.harness_adapters.launching import KEY_VARIABLE, Launch, with_arguments
from kvws.harness_adapters.writing import write_new

Setting = str | int


def config_toml(address: ServerAddress) -> str:
    """What belongs into $CODEX_HOME/config.toml."""
    lines = [f"{name} = {_toml(value)}" for name, value in _settings(address).items()]
    lines += ["", f"[model_providers.{MODEL_NAME}]"]
    lines += [f"{name} = {_toml(value)}" for name, value in _provider(address).items()]
    return "\n".join(lines) + "\n"


def write_config(path: Path, address: ServerAddress) -> None:
    """Write it where there is no such file yet.

    Raises:
        ConfigError: there is one; says what to merge.
    """
    write_new(path, config_toml(address))


def environment(address: ServerAddress) -> dict[str, str]:
    """What the config file refers to."""
    return {KEY_VARIABLE: address.token}


def launch(command: Sequence[str], address: ServerAddress) -> Launch:
    """Start `codex` with any arguments of its own; the user's config file stays as it is."""
    overrides: list[str] = []
    for name, value in _settings(address).items():
        overrides += ["-c", f"{name}={_toml(value)}"]
    for name, value in _provider(address).items():
        overrides += ["-c", f"model_providers.{MODEL_NAME}.{name}={_toml(value)}"]
    return Launch(with_arguments(command, overrides), environment(address))


def _settings(address: ServerAddress) -> dict[str, Setting]:
    return {
        "model": MODEL_NAME,
        "model_provider": MODEL_NAME,
        "model_context_window": address.window_tokens,
    }


def _provider(address: ServerAddress) -> dict[str, Setting]:
    return {
        "name": MODEL_NAME,
        "base_url": address.openai_url,
        "wire_api": "responses",
        "env_key": KEY_VARIABLE,
        "stream_idle_timeout_ms": 1000 * STALL_S,
    }


def _toml(value: Setting) -> str:
    """A JSON string or integer is a TOML one."""
    return json.dumps(value)
