"""An agent does again what it did in such a place: turns by how alike what came before them is."""

from __future__ import annotations

from collections import Counter
from math import log, sqrt

import numpy as np
import pytest

from kvws.recall.text import succession
from kvws.recall.text.index import TextIndex
from kvws.recall.text.spelling import Spelling
from kvws.recall.text.succession import succession_scores
from kvws.recall.text.terms import terms
from kvws.recall.text.turns import Exchange
from tests.recall.text.toys import BLOCK, Blocks, Words, padded

SAY, HEAR = "<|im_start|> assistant", "<|im_start|> user"


def session(words: Words, *rounds: tuple[str, str]) -> list[int]:
    """A task, then what the assistant said and what it heard, each in a block of its own."""
    fill = words(".")[0]
    tokens = padded(words(f"{HEAR} please mend the build"), fill)
    for says, hears in rounds:
        tokens += padded(words(f"{SAY} {says}"), fill)
        tokens += padded(words(f"{HEAR} {hears}"), fill)
    return tokens


ROUNDS = (
    ("run tests", "error in parser"),  # blocks 1, 2
    ("open parser", "def parse tokens"),  # 3, 4
    ("list files", "readme setup"),  # 5, 6
    ("read readme", "install with pip"),  # 7, 8
    ("run tests", "error in lexer"),  # 9, 10
)


def read(words: Words, tokens: list[int]) -> tuple[TextIndex, tuple[int, ...]]:
    blocks = Blocks()
    index = TextIndex(words.spelling)
    line = blocks.extend(tokens)
    assert blocks.read_into(index)
    return index, line


def everyone(count: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.ones(count, dtype=np.uint8)


def test_the_turn_that_followed_the_most_alike_exchange_is_best() -> None:
    words = Words()
    index, line = read(words, session(words, *ROUNDS))
    scores = index.succession(line, words(SAY), everyone(len(line)))
    assert scores is not None
    turns = {1: "run", 3: "open", 5: "list", 7: "read", 9: "run"}
    assert turns[int(scores.argmax())] == "open", "after tests were run and an error was shown"
    assert set(np.flatnonzero(scores).tolist()) == set(turns)


def test_scores_are_relative_likeness_plus_newness() -> None:
    words = Words()
    index, line = read(words, session(words, *ROUNDS))
    scores = index.succession(line, words(SAY), everyone(len(line)))
    assert scores is not None
    contexts = [terms("please mend the build")]
    contexts += [terms(f"{says} {hears}") for says, hears in ROUNDS]
    *earlier, coming = contexts
    average = sum(map(len, earlier)) / len(earlier)
    alike: list[float] = []
    for context in earlier:
        bm25 = 0.0
        for term, asked in Counter(coming).items():
            having = sum(term in other for other in earlier)
            count = context.count(term)
            normal = 1.2 * (0.25 + 0.75 * len(context) / average)
            rarity = log(1 + (len(earlier) - having + 0.5) / (having + 0.5))
            bm25 += min(sqrt(asked), 3) * rarity * count * 2.2 / (count + normal)
        alike.append(bm25)
    expected = [
        bm25 / max(alike) + 0.5 * order / len(earlier) for order, bm25 in enumerate(alike, 1)
    ]
    assert scores[[1, 3, 5, 7, 9]].tolist() == pytest.approx(expected, rel=1e-5)


def test_what_is_asked_now_counts_though_it_is_no_block() -> None:
    words = Words()
    index, line = read(words, session(words, *ROUNDS[:4]))
    question = words(f"{SAY} list files {HEAR} readme setup {SAY}")
    scores = index.succession(line, question, everyone(len(line)))
    assert scores is not None and int(scores.argmax()) == 7


def test_the_beginning_of_a_turn_is_ahead_of_its_rest_and_newer_turns_of_older_ones() -> None:
    line = (4, 5, 6, 8, 9)
    exchanges = [Exchange(0, 0, 10, 3 * BLOCK, False), Exchange(1, 10, 100, 5 * BLOCK, False)]
    scores = succession_scores(line, exchanges, np.zeros(2, dtype=np.float32), 12)
    expected = {4: 0.25, 5: 0.2499, 6: 0.2498, 8: 0.5, 9: 0.4999}
    assert scores.tolist() == pytest.approx([expected.get(block, 0) for block in range(12)])


def test_a_block_of_two_turns_has_the_higher_score() -> None:
    exchanges = [Exchange(0, 0, 0, 40, False), Exchange(1, 0, 50, 64, False)]
    for alike, shared in (([1.0, 0.0], 1.25 - 1e-4), ([0.0, 1.0], 1.5)):
        scores = succession_scores((0, 1), exchanges, np.array(alike, dtype=np.float32), 2)
        assert scores[1] == pytest.approx(shared)


def test_only_candidates_are_scored() -> None:
    words = Words()
    index, line = read(words, session(words, *ROUNDS))
    candidates = everyone(len(line))
    candidates[3] = 0
    scores = index.succession(line, words(SAY), candidates)
    assert scores is not None and scores[3] == 0 and scores[1] > 0


def test_of_a_long_line_the_newest_turns_alone_compete(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it began with them, but for what comes before the first."""
    words = Words()
    index, line = read(words, session(words, *ROUNDS))
    shorter, short_line = read(words, session(words, *ROUNDS)[4 * BLOCK :])
    expected = shorter.succession(short_line, words(SAY), everyone(len(short_line)))
    assert expected is not None and np.flatnonzero(expected).tolist() == [1, 3, 5]
    monkeypatch.setattr(succession, "NEWEST_TURNS", 3)
    scores = index.succession(line, words(SAY), everyone(len(line)))
    assert scores is not None
    assert (scores[4:] == expected).all() and not scores[:4].any()
    monkeypatch.setattr(succession, "NEWEST_TURNS", 5)
    scores = index.succession(line, words(SAY), everyone(len(line)))
    assert scores is not None and np.flatnonzero(scores).tolist() == [1, 3, 5, 7, 9]


def test_turns_of_other_branches_do_not_count() -> None:
    words = Words()
    blocks = Blocks()
    index = TextIndex(words.spelling)
    main = blocks.extend(session(words, *ROUNDS[:3]))
    fork = blocks.extend(session(words, *ROUNDS[:2])[BLOCK:], behind=main[0])
    assert blocks.read_into(index)
    of_main = index.succession(main, words(SAY), everyone(len(blocks.tokens)))
    of_fork = index.succession((main[0], *fork), words(SAY), everyone(len(blocks.tokens)))
    assert of_main is not None and of_fork is not None
    assert set(np.flatnonzero(of_main).tolist()) == {main[1], main[3], main[5]}
    assert set(np.flatnonzero(of_fork).tolist()) == {fork[0], fork[2]}


def test_of_a_long_context_its_two_ends_are_read() -> None:
    words = Words()
    fill = words("filler")[0]
    tokens = padded(words("alpha"), fill, 20) + padded(words("middle"), fill, 20)
    tokens += padded(words("omega"), fill) + padded(words(f"{SAY} first {HEAR}"), fill)
    second = padded(words("other"), fill, 30)
    tokens += second + padded(words(f"{SAY} second {HEAR}"), fill) + padded(words("b"), fill)
    index, line = read(words, tokens)
    first_turn, second_turn = 41, 72

    def lead(asked: str) -> float:
        scores = index.succession(line, words(f"{SAY} x {HEAR} {asked} {SAY}"), mask)
        assert scores is not None
        return float(scores[first_turn] - scores[second_turn])

    mask = everyone(len(line))
    assert lead("alpha") > 0.2 and lead("omega") > 0.2
    assert lead("middle") == pytest.approx(lead("unheard"))


def test_there_is_no_succession_without_an_earlier_turn_or_an_opening() -> None:
    words = Words()
    index, line = read(words, session(words))
    assert index.succession(line, words(SAY), everyone(len(line))) is None
    assert index.succession((), words(SAY), everyone(len(line))) is None
    silent = TextIndex(Spelling(words.decode))
    blocks = Blocks()
    line = blocks.extend(session(words, *ROUNDS))
    assert blocks.read_into(silent)
    assert silent.succession(line, words(SAY), everyone(len(line))) is None


def test_a_line_that_was_not_read_to_its_end_has_none_yet() -> None:
    words = Words()
    blocks = Blocks()
    index = TextIndex(words.spelling)
    line = blocks.extend(session(words, *ROUNDS))
    assert not blocks.read_into(index, at_most=6)
    assert index.succession(line, words(SAY), everyone(len(line))) is None
    assert blocks.read_into(index)
    assert index.succession(line, words(SAY), everyone(len(line))) is not None
