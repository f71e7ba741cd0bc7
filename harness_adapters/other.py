"""Any other client: the variables that the OpenAI and Anthropic libraries read by themselves."""

from __future__ import annotations

from collections.abc import Sequence

from kvws.harness_adapters.address import MODEL_NAME, ServerAddress
from kvws.harness_adapters.launching import Launch


def environment(address: ServerAddress) -> dict[str, str]:
    """Both vendors' variables; OPENAI_API_BASE is what older clients call OPENAI_BASE_URL."""
    return {
        "OPENAI_BASE_URL": address.openai_url,
        "OPENAI_API_BASE": address.openai_url,
        "OPENAI_API_KEY": address.token,
        "ANTHROPIC_BASE_URL": address.base_url,
        "ANTHROPIC_AUTH_TOKEN": address.token,
        "ANTHROPIC_MODEL": MODEL_NAME,
    }


def launch(command: Sequence[str], address: ServerAddress) -> Launch:
    """Start a client that is told nothing on its command line."""
    return Launch(tuple(command), environment(address), unset=("ANTHROPIC_API_KEY",))
