"""The words of made-up sessions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product

from kvws.bench.scale_words import ZipfTurns, whole_words
from kvws.recall.text.spelling import Spelling

OPENING = (1, 2)
PIECES = ["<pad>", "<|start|>", "assistant", " x", " a7", "-", "Ġ", *(
    f" {''.join(letters)}" for letters in product("abcdefghij", repeat=3)
)]  # fmt: skip
WORDS = range(7, len(PIECES))


def decode(tokens: Sequence[int]) -> str:
    return "".join(PIECES[token] for token in tokens)


def turns(seed: int = 1) -> ZipfTurns:
    return ZipfTurns(Spelling(decode, OPENING), len(PIECES), seed)


def test_words_are_tokens_of_three_letters_or_more() -> None:
    assert whole_words(decode, len(PIECES)) == [2, *WORDS]


def test_a_vocabulary_without_words_is_taken_as_it_is() -> None:
    assert whole_words(lambda tokens: "?", 50) == list(range(50))


def test_a_turn_opens_and_is_answered_by_another_message() -> None:
    source = turns()
    turn = source.turn()
    assert len(turn) == source.turn_tokens
    assert tuple(turn[:2]) == OPENING
    assert [place for place, token in enumerate(turn) if token == 1] == [0, 62]


def test_a_template_without_an_opening_has_words_alone() -> None:
    source = ZipfTurns(Spelling(decode), len(PIECES), 1)
    assert len(source.turn()) == source.turn_tokens == 900
    assert set(source.turn()) <= {2, *WORDS}


def test_a_few_words_are_most_of_what_is_said_and_many_are_rare() -> None:
    counts = Counter(turns().words(20_000))
    common = sum(count for _, count in counts.most_common(100))
    assert 0.5 < common / 20_000 < 0.8
    assert counts[WORDS[10]] > 2 * counts[WORDS[100]] > 2 * counts[WORDS[900]]
    assert len(counts) > 900


def test_words_are_the_same_in_every_run() -> None:
    assert turns().turn() == turns().turn() != turns(seed=2).turn()
