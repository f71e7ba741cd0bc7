"""opencode: a provider that speaks chat completions, in its config file or inline.

The key is read from the environment variable KVWS_API_KEY. Pruning is off: it would empty old tool
outputs in the history, and everything behind the first of them would be computed again. What the
model need not look at stays out of its view without that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvws.harness_adapters.address import MODEL_NAME, ServerAddress
from kvws.harness_adapters.launching import KEY_VARIABLE, Launch
from kvws.harness_adapters.writing import write_new


def config_json(address: ServerAddress) -> str:
    """What belongs into opencode.json."""
    return json.dumps(_config(address), indent=2) + "\n"


def write_config(path: Path, address: ServerAddress) -> None:
    """Write it where there is no such file yet.

    Raises:
        ConfigError: there is one; says what to merge.
    """
    write_new(path, config_json(address))


def environment(address: ServerAddress) -> dict[str, str]:
    """The key, and the config inline: opencode lays it over the user's own."""
    return {
        KEY_VARIABLE: address.token,
        "OPENCODE_CONFIG_CONTENT": json.dumps(_config(address)),
    }


def launch(command: Sequence[str], address: ServerAddress) -> Launch:
    """Start `opencode` with any arguments of its own; the user's config file stays as it is."""
    return Launch(tuple(command), environment(address))


def _config(address: ServerAddress) -> dict[str, Any]:
    model = {
        "name": f"{MODEL_NAME} ({address.model})",
        "tool_call": True,
        "limit": {"context": address.window_tokens, "output": address.answer_tokens},
    }
    return {
        "$schema": "https://opencode.ai/config.json",
        "model": f"{MODEL_NAME}/{MODEL_NAME}",
        "small_model": f"{MODEL_NAME}/{MODEL_NAME}",
        "compaction": {"prune": False},
        "provider": {
            MODEL_NAME: {
                "npm": "@ai-sdk/openai-compatible",
                "name": MODEL_NAME,
                "options": {
                    "baseURL": address.openai_url,
                    "apiKey": f"{{env:{KEY_VARIABLE}}}",
                    "timeout": False,
                },
                "models": {MODEL_NAME: model},
            }
        },
    }
