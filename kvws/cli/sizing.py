"""Sizes that nobody set, chosen for the model and the machine that serve it."""

from __future__ import annotations

import dataclasses

from kvws.config import Resolved, Settings

_BUDGET_MAX_TOKENS = 32_768
_RESERVE_MAX_TOKENS = 16_384
_QUERY_TOKENS = 512


def sized_to_model(resolved: Resolved, positions: int) -> Settings:
    """Settings for a machine with an accelerator: half of the model's positions for the view, a
    quarter beside it. What a user has set stays as it is.

    Args:
        positions: that the model was made for.
    """
    settings = resolved.settings
    chosen = {
        "budget": min(_BUDGET_MAX_TOKENS, positions // 2),
        "reserve": min(_RESERVE_MAX_TOKENS, positions // 4),
        "query": min(_QUERY_TOKENS, positions // 16),
    }
    unset = {
        name: max(value, getattr(settings, name))
        for name, value in chosen.items()
        if resolved.sources[name] == "default"
    }
    return dataclasses.replace(settings, **unset)
