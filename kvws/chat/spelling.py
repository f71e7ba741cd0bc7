"""How a model's chat template spells what retrieval looks for."""

from __future__ import annotations

from kvws.chat.message import Message
from kvws.chat.render import NO_OPTIONS, ChatRenderer
from kvws.chat.word_rarity import WordRarity
from kvws.recall.text.spelling import Spelling

_MARK = "k7v2w9s4"


def spelling_of(renderer: ChatRenderer) -> Spelling:
    """The renderer's tokenizer, and the tokens that open an assistant's turn."""
    rarity = WordRarity(renderer.pieces.unremembered, renderer.vocabulary)
    return Spelling(renderer.decode, _opening(renderer), rarity)


def _opening(renderer: ChatRenderer) -> tuple[int, ...]:
    """What stands between a user's message and an answer that more was said behind, as some
    templates put an empty thought into the last one alone; without blanks at its end: they may
    become one token with the answer's beginning."""
    messages = (Message("user", "Hello"), Message("assistant", _MARK), Message("user", "Hello"))
    _, asked = renderer.first_text(messages[:1], (), False, NO_OPTIONS)
    _, answered = renderer.first_text(messages, (), False, NO_OPTIONS)
    if not answered.startswith(asked) or _MARK not in answered:
        return ()
    opening = answered[len(asked) : answered.index(_MARK)].rstrip()
    return tuple(renderer.pieces(opening)) if opening else ()
