"""BM25: compared with the formula written down plainly."""

from __future__ import annotations

import math
from collections import Counter
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvws.recall.text import lexical
from kvws.recall.text.lexical import LexicalIndex

WORDS = st.lists(st.sampled_from("abcdefg"), max_size=12)


def plain_bm25(
    documents: dict[int, list[str]], question: list[str], candidates: list[int]
) -> list[float]:
    among = [number for number in documents if candidates[number]]
    scores = [0.0] * len(candidates)
    if not among:
        return scores
    average = sum(len(documents[number]) for number in among) / len(among)
    for number in among:
        counts = Counter(documents[number])
        for term, asked in Counter(question).items():
            having = sum(term in documents[other] for other in among)
            rarity = math.log(1 + (len(among) - having + 0.5) / (having + 0.5))
            if count := counts[term]:
                normal = 1.2 * (1 - 0.75 + 0.75 * len(documents[number]) / average)
                weight = min(math.sqrt(asked), 3.0)
                scores[number] += weight * rarity * count * 2.2 / (count + normal)
    return scores


@given(
    documents=st.dictionaries(st.integers(0, 9), WORDS, max_size=8),
    question=WORDS,
    candidates=st.lists(st.integers(0, 1), min_size=10, max_size=10),
)
def test_scores_are_bm25_among_the_candidates(
    documents: dict[int, list[str]], question: list[str], candidates: list[int]
) -> None:
    index = LexicalIndex()
    for number, words in documents.items():  # in any order: numbers may come back
        index.add(number, words)
    scores = index.scores(question, np.array(candidates, dtype=np.uint8))
    assert scores.dtype == np.float32
    assert scores.tolist() == pytest.approx(
        plain_bm25(documents, question, candidates), rel=1e-5, abs=1e-7
    )


@given(
    documents=st.lists(WORDS, min_size=1, max_size=8),
    question=WORDS,
    candidates=st.lists(st.integers(0, 1), min_size=8, max_size=8),
    at_once_entries=st.integers(1, 20),
)
def test_terms_that_are_summed_in_several_batches_give_the_same(
    documents: list[list[str]], question: list[str], candidates: list[int], at_once_entries: int
) -> None:
    index = LexicalIndex()
    for number, words in enumerate(documents):
        index.add(number, words)
    mask = np.array(candidates, dtype=np.uint8)
    at_once = index.scores(question, mask)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lexical, "_AT_ONCE_ENTRIES", at_once_entries)
        assert (index.scores(question, mask) == at_once).all()


class TestAQuestionThatAsksForMoreEntriesThanAreRead:
    """A third of the documents has `some`, all have `common`, one has `rare`."""

    question: ClassVar[list[str]] = ["common", "rare", "some", "common"]
    everyone = np.ones(9, dtype=np.uint8)

    @pytest.fixture
    def index(self) -> LexicalIndex:
        index = LexicalIndex()
        for number in range(9):
            index.add(number, ["common"] + ["some"] * (number % 3 == 0) + ["rare"] * (number == 4))
        return index

    @pytest.mark.parametrize(
        ("most_entries", "counting"),
        [
            (13, {"rare", "some", "common"}),
            (12, {"rare", "some"}),
            (4, {"rare", "some"}),
            (3, {"rare"}),
            (1, {"rare"}),
        ],
    )
    def test_is_answered_by_its_rarest_terms(
        self,
        index: LexicalIndex,
        most_entries: int,
        counting: set[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        rarest = [term for term in self.question if term in counting]
        expected = index.scores(rarest, self.everyone)
        monkeypatch.setattr(lexical, "MOST_ENTRIES", most_entries)
        assert (index.scores(self.question, self.everyone) == expected).all()
        assert expected.argmax() == 4

    def test_is_answered_by_the_rarest_alone_if_even_that_is_in_too_many(
        self, index: LexicalIndex, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(lexical, "MOST_ENTRIES", 2)
        scores = index.scores(["common", "some"], self.everyone)
        assert np.flatnonzero(scores).tolist() == [0, 3, 6]

    def test_may_ask_for_any_number_in_documents_before_the_candidates(
        self, index: LexicalIndex, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        newest = np.array([0] * 6 + [1] * 3, dtype=np.uint8)
        expected = index.scores(self.question, newest)
        monkeypatch.setattr(lexical, "MOST_ENTRIES", 3 + 1)
        assert (index.scores(self.question, newest) == expected).all() and expected[8] > 0


@given(words=WORDS, split=st.integers(0, 12))
def test_terms_added_later_count_like_terms_added_at_once(words: list[str], split: int) -> None:
    at_once, in_two = LexicalIndex(), LexicalIndex()
    for index in (at_once, in_two):
        index.add(3, ["a", "b"])
    at_once.add(1, words)
    in_two.add(1, words[:split])
    in_two.add(2, ["c"])
    at_once.add(2, ["c"])
    in_two.add(1, words[split:])
    everyone = np.ones(4, dtype=np.uint8)
    question = list("abcdefg")
    assert (in_two.scores(question, everyone) == at_once.scores(question, everyone)).all()


def test_more_documents_than_candidates_and_fewer_are_both_fine() -> None:
    index = LexicalIndex()
    for number in range(5):
        index.add(number, ["word"] * (number + 1))
    assert np.flatnonzero(index.scores(["word"], np.ones(3, dtype=np.uint8))).tolist() == [0, 1, 2]
    scores = index.scores(["word"], np.ones(9, dtype=np.uint8))
    assert np.flatnonzero(scores).tolist() == [0, 1, 2, 3, 4]


@given(
    documents=st.dictionaries(st.integers(0, 9), WORDS, min_size=1, max_size=8),
    question=WORDS,
    rarities=st.fixed_dictionaries({word: st.floats(0.05, 1.0) for word in "abcdefg"}),
)
def test_what_a_term_gives_is_weighed_by_how_much_it_tells(
    documents: dict[int, list[str]], question: list[str], rarities: dict[str, float]
) -> None:
    index = LexicalIndex()
    for number, words in documents.items():
        index.add(number, words)
    every = np.ones(10, dtype=np.uint8)
    asked = {term: [word for word in question if word == term] for term in question}
    of_terms = [rarities[term] * index.scores(words, every) for term, words in asked.items()]
    expected = sum(of_terms, start=np.zeros(10))
    scores = index.scores(question, every, rarities.__getitem__)
    assert scores.tolist() == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-6)


def test_a_repeated_question_term_weighs_no_more_than_three_times() -> None:
    index = LexicalIndex()
    index.add(0, ["word"])
    index.add(1, ["other"])
    everyone = np.ones(2, dtype=np.uint8)
    once, four, many = (index.scores(["word"] * n, everyone)[0] for n in (1, 4, 100))
    assert four == pytest.approx(2 * once)
    assert many == pytest.approx(3 * once)


def test_nothing_asked_or_nobody_there_scores_nothing() -> None:
    index = LexicalIndex()
    assert not index.scores(["word"], np.ones(3, dtype=np.uint8)).any()
    index.add(0, ["word"])
    assert not index.scores([], np.ones(3, dtype=np.uint8)).any()
    assert not index.scores(["word"], np.zeros(3, dtype=np.uint8)).any()
    assert index.scores(["word"], np.zeros(0, dtype=np.uint8)).shape == (0,)
