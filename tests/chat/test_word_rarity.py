"""How rare words are, by the vocabulary of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvws.chat.render import ChatRenderer
from kvws.chat.spelling import spelling_of
from kvws.chat.word_rarity import LEAST, WordRarity

VOCABULARY = 30_000


def rarity_of(entries: dict[str, int]) -> WordRarity:
    """By a tokenizer that has these entries, and spells all else letter by letter."""

    def pieces(text: str) -> Sequence[int]:
        return [entries[text]] if text in entries else [ord(letter) % 256 for letter in text]

    return WordRarity(pieces, VOCABULARY)


def test_a_word_tells_the_more_the_higher_its_number_is() -> None:
    rarity = rarity_of({" the": 300, " some": 3_000, " glacier": 29_999})
    assert rarity("the") == LEAST
    assert rarity("some") == pytest.approx(0.5)
    assert rarity("glacier") == pytest.approx(1.0, abs=1e-4)


def test_what_is_no_entry_tells_as_much_as_any_word() -> None:
    assert rarity_of({" the": 300})("_sqlite_datetime_parse") == 1.0


def test_bytes_and_markers_tell_no_less_than_the_commonest_word() -> None:
    assert rarity_of({" a": 64})("a") == LEAST


def test_tokenizers_that_put_the_blank_there_themselves_are_read_too() -> None:
    assert rarity_of({"some": 3_000})("some") == pytest.approx(0.5)


def test_entries_beyond_the_vocabulary_tell_no_more_than_the_last_of_it() -> None:
    assert rarity_of({" added": 10 * VOCABULARY})("added") == 1.0


def test_a_vocabulary_of_bytes_alone_knows_no_common_words() -> None:
    assert WordRarity(lambda text: list(text.encode()), 256)("the") == 1.0


def test_a_word_is_spelled_once() -> None:
    spelled: list[str] = []

    def pieces(text: str) -> Sequence[int]:
        spelled.append(text)
        return [500]

    rarity = WordRarity(pieces, VOCABULARY)
    assert rarity("file") == rarity("file") and spelled == [" file"]


def test_the_packaged_model_knows_the_words_that_questions_are_made_of(smollm2: Path) -> None:
    rarity = spelling_of(ChatRenderer(smollm2)).rarity
    asking = [rarity(word) for word in ("the", "of", "which", "who", "where", "was", "does")]
    telling = [rarity(word) for word in ("crawler", "maintainer", "db_for_write", "c7827754")]
    assert max(asking) < 0.3 and min(telling) == 1.0
    assert max(asking) < rarity("router") < 1.0


def test_what_words_are_spelled_by_is_what_texts_are_spelled_by(smollm2: Path) -> None:
    pieces = ChatRenderer(smollm2).pieces
    for text in (" the", "the", " _sqlite_datetime_parse", " ☃", ""):
        assert pieces.unremembered(text) == pieces(text)
