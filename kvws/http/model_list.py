"""What GET /v1/models says, to OpenAI and to Anthropic clients.

There is one model, and every name is answered by it; these are the names that clients can offer:

    the model's own name
    kvws, kvws[1m]                         Claude Code takes [1m] off and believes in a window of a
                                           million tokens
    anthropic-kvws, anthropic-kvws[1m]     the same in the Anthropic list: Claude Code's model
                                           discovery ignores names that begin with neither claude
                                           nor anthropic. claude- would do worse: for such names it
                                           goes by its own idea of the window
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

_ALIASES = ("kvws", "kvws[1m]")
_DISCOVERED_ALIASES = ("anthropic-kvws", "anthropic-kvws[1m]")


def model_list(model: str, window_tokens: int, *, created: int, anthropic: bool) -> dict[str, Any]:
    """The list of models.

    Args:
        model: the name of the served model.
        window_tokens: of prompt and answer together.
        created: Unix time in seconds.
        anthropic: whether in Anthropic's shape; else in OpenAI's.
    """
    aliases = (*_ALIASES, *(_DISCOVERED_ALIASES if anthropic else ()))
    names = list(dict.fromkeys((model, *aliases)))
    data = [
        one_model(name, model, window_tokens, created=created, anthropic=anthropic)
        for name in names
    ]
    if not anthropic:
        return {"object": "list", "data": data}
    return {"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}


def one_model(
    name: str, model: str, window_tokens: int, *, created: int, anthropic: bool
) -> dict[str, Any]:
    """The model under one name; any name will do, as it does in calls.

    Args:
        name: that it was asked for.
    """
    if not anthropic:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "kvws",
            "max_model_len": window_tokens,
            "context_window": window_tokens,
        }
    return {
        "type": "model",
        "id": name,
        "display_name": name if name == model else f"{name} ({model})",
        "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": window_tokens,
    }
