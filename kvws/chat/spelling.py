"""How a model's chat template spells what retrieval looks for."""

from __future__ import annotations

from dataclasses import replace

from kvws.chat.message import Message
from kvws.chat.render import NO_OPTIONS, ChatRenderer
from kvws.chat.word_rarity import WordRarity
from kvws.recall.text.spelling import Spelling, is_marker

_MARK, _LATER = "k7v2w9s4", "s4w9v2k7"


def spelling_of(renderer: ChatRenderer) -> Spelling:
    """The renderer's tokenizer, and the tokens that open the turns of both sides."""
    rarity = WordRarity(renderer.pieces.unremembered, renderer.vocabulary)
    spelling = Spelling(renderer.decode, _opening(renderer), rarity)
    return replace(spelling, user_opening=_user_opening(renderer, spelling))


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


def _user_opening(renderer: ChatRenderer, spelling: Spelling) -> tuple[int, ...]:
    """What a user's message behind an answer begins with, without blanks at its end: from the
    marker that starts every message, or from the last marker there is."""
    messages = (Message("user", "Hello"), Message("assistant", _MARK), Message("user", _LATER))
    _, asked = renderer.first_text(messages, (), False, NO_OPTIONS)
    if not 0 <= asked.find(_MARK) < asked.find(_LATER):
        return ()
    between = asked[asked.index(_MARK) + len(_MARK) : asked.index(_LATER)]
    tokens = tuple(renderer.pieces(between.rstrip()))
    starts = [i for i, token in enumerate(tokens) if token == spelling.message_start]
    starts = starts or [i for i in range(len(tokens)) if is_marker(renderer.decode([tokens[i]]))]
    return tokens[starts[-1] :] if starts else ()
