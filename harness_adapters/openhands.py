"""OpenHands: an `LLM` for its SDK, a settings file or an environment for its CLI.

The SDK is imported only when an object of it is asked for. Condensing is off: a condenser replaces
the older half of the history by a summary, so that the rest is computed again, and what it drops
is what the server keeps within reach anyway. The window that the LLM is given is the server's, so
no history outgrows it before the server says so.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvws.errors import ConfigError
from kvws.harness_adapters.address import MODEL_NAME, STALL_S, ServerAddress
from kvws.harness_adapters.launching import Launch, with_arguments
from kvws.harness_adapters.writing import write_new

_OVERRIDE = "--override-with-envs"
"""Without it the CLI ignores the variables of `environment`."""

_SUBCOMMANDS = frozenset({"acp", "cloud", "login", "logout", "mcp", "serve", "view", "web"})


def llm(address: ServerAddress, *, workspace: str | None = None, **overrides: Any) -> Any:
    """The SDK's `LLM`, for `Agent(llm=llm(address), condenser=condenser(), …)`.

    Args:
        workspace: a name that several conversations share one session by; None gives each its own.
        overrides: further fields of `LLM`.

    Raises:
        ConfigError: the SDK is not installed.
    """
    return _sdk("openhands.sdk").LLM(**{**_llm_fields(address, workspace), **overrides})


def condenser() -> Any:
    """The SDK's condenser that leaves histories alone.

    Raises:
        ConfigError: the SDK is not installed.
    """
    return _sdk("openhands.sdk.context.condenser").NoOpCondenser()


def agent_settings(address: ServerAddress, *, workspace: str | None = None) -> str:
    """What belongs into ~/.openhands/agent_settings.json, the CLI's. Holds the key."""
    settings: dict[str, Any] = {
        "kind": "Agent",
        "llm": _llm_fields(address, workspace),
        "tools": [],
        "condenser": None,
    }
    return json.dumps(settings, indent=2) + "\n"


def write_agent_settings(
    path: Path, address: ServerAddress, *, workspace: str | None = None
) -> None:
    """Write it where there is no such file yet.

    Raises:
        ConfigError: there is one; says what to merge.
    """
    write_new(path, agent_settings(address, workspace=workspace))


def environment(address: ServerAddress) -> dict[str, str]:
    """What `openhands --override-with-envs` reads."""
    return {
        "LLM_MODEL": f"openai/{MODEL_NAME}",
        "LLM_BASE_URL": address.openai_url,
        "LLM_API_KEY": address.token,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


def launch(command: Sequence[str], address: ServerAddress) -> Launch:
    """Start `openhands` with any arguments of its own. Its settings file still says whether it
    condenses."""
    is_plain = not _SUBCOMMANDS.intersection(command[1:2])
    missing = [_OVERRIDE] if is_plain and _OVERRIDE not in command else []
    return Launch(with_arguments(command, missing), environment(address))


def _llm_fields(address: ServerAddress, workspace: str | None) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "usage_id": "agent",
        "model": f"openai/{MODEL_NAME}",
        "base_url": address.openai_url,
        "api_key": address.token,
        "max_input_tokens": address.window_tokens,
        "timeout": STALL_S,
    }
    if workspace is not None:
        fields["extra_headers"] = {"X-Kvws-Workspace": workspace}
    return fields


def _sdk(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"the OpenHands SDK cannot be imported: {error}",
            hint="with Python 3.12 or newer: uv pip install openhands-sdk openhands-tools",
        ) from error
