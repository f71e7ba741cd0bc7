"""OpenAI's chat completions: `POST /v1/chat/completions`."""

from kvws.http.chat_completions.dialect import CHAT_COMPLETIONS, is_aside

__all__ = ["CHAT_COMPLETIONS", "is_aside"]
