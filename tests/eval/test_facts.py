"""Planted facts: three disjoint sets, questions that only their fact answers, places in a text."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvws.eval.fact_templates import Template
from kvws.eval.facts import CALIBRATION, DEVELOPMENT, TEST, Fact, FactSet, plant
from kvws.eval.synthetic import synthetic_messages

SETS = (CALIBRATION, DEVELOPMENT, TEST)
TEMPLATES = [template for facts in SETS for template in facts.templates]
SMALL_WORDS = frozenset(
    {
        *("a", "an", "and", "as", "at", "be", "been", "but", "by", "can", "did", "do", "does"),
        *("for", "from", "had", "has", "have", "he", "how", "i", "in", "is", "it", "its", "may"),
        *("not", "now", "of", "on", "one", "or", "she", "so", "than", "that", "the", "then"),
        *("they", "this", "to", "up", "was", "we", "were", "what", "when", "where", "which"),
        *("who", "whom", "whose", "will", "with", "are"),
    }
)


def words(text: str) -> set[str]:
    """Words that say something, without plural."""
    found = re.findall(r"[a-z]+", text.lower())
    return {word.rstrip("s") for word in found if word not in SMALL_WORDS and len(word) > 1}


def one_fact(template: Template, subject: str = "subject", value: str = "value") -> Fact:
    return Fact(template, subject, value)


def test_there_are_enough_forms_of_many_kinds() -> None:
    assert len(TEMPLATES) >= 16
    assert len({template.name for template in TEMPLATES}) == len(TEMPLATES)
    assert {template.kind for template in TEMPLATES} == {
        *("code", "port", "number", "version", "name", "hash", "path", "words")
    }


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
def test_a_question_can_be_put_as_an_order(template: Template) -> None:
    for question in one_fact(template).questions:
        order = question.as_order()
        asked = question.text[0].lower() + question.text[1:-1]
        assert order.text == f"Tell me {asked}." and question.text.endswith("?")
        assert replace(order, text=question.text) == question


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
def test_a_fact_says_subject_and_value_and_a_question_only_the_subject(
    template: Template,
) -> None:
    fact = one_fact(template)
    later = fact.changed_to("later")
    assert "subject" in fact.text.lower() and "value" in fact.text
    assert "later" in later.text and "value" not in later.text.replace("value,", "")
    assert [q.value for q in later.questions] == ["later"] * len(later.questions)
    assert [q.text for q in later.questions] == [q.text for q in fact.questions]
    for question in fact.questions:
        assert "subject" in question.text.lower()
        assert "{" not in fact.text.replace('{"', "") and "{" not in question.text


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
def test_a_verbatim_question_shares_words_with_its_fact(template: Template) -> None:
    fact = one_fact(template)
    verbatim = fact.questions[0]
    assert verbatim.kind == "verbatim"
    shared = words(verbatim.text) & words(fact.text)
    assert "subject" in shared and len(shared) >= 2


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
def test_paraphrases_share_the_subject_alone(template: Template) -> None:
    fact = one_fact(template)
    assert len(fact.questions) >= 3
    for question in fact.questions[1:]:
        assert question.kind == "paraphrased"
        assert words(question.text) & words(fact.text) == {"subject"}
        assert not words(question.cue) & words(fact.text)


def test_sets_share_no_form_subject_word_or_person() -> None:
    for one, other in combinations(SETS, 2):
        for part in ("templates", "subjects", "words", "people"):
            assert not set(getattr(one, part)) & set(getattr(other, part)), part


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_sets_share_no_value(seed: int) -> None:
    for kind in {template.kind for template in TEMPLATES}:
        values = {
            facts.name: {facts.value(kind, f"{seed}.{i}") for i in range(20)} for facts in SETS
        }
        for one, other in combinations(values.values(), 2):
            assert not one & other, kind


@pytest.mark.parametrize("facts", SETS, ids=lambda facts: facts.name)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 16), distractors=st.integers(0, 3))
def test_no_two_facts_of_a_history_answer_the_same_question(
    facts: FactSet, seed: int, count: int, distractors: int
) -> None:
    asked, others = facts.draw(seed, count, distractors=distractors)
    everything = asked + others
    assert len(asked) == count and len(others) == count * distractors
    assert len({(fact.template.name, fact.subject) for fact in everything}) == len(everything)
    assert len({fact.value for fact in everything}) == len(everything)
    for place, fact in enumerate(asked):
        own = others[place * distractors : (place + 1) * distractors]
        assert all(other.template == fact.template for other in own)
        assert all(other.subject != fact.subject for other in own)


def test_subjects_come_up_more_than_once() -> None:
    asked, _ = CALIBRATION.draw(0, 12)
    assert len({fact.subject for fact in asked}) == 6


def test_the_same_seed_draws_the_same_facts() -> None:
    assert CALIBRATION.draw(3, 8) == CALIBRATION.draw(3, 8)
    assert CALIBRATION.draw(3, 8) != CALIBRATION.draw(4, 8)


def test_too_many_facts_are_refused() -> None:
    with pytest.raises(ValueError, match="too few subjects"):
        TEST.draw(0, 6, distractors=40)


# A tokenizer whose tokens are characters, but for marks that open messages.
MARK = 1


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def decode(tokens: object) -> str:
    return "".join("<|mark|>" if token == MARK else chr(token) for token in tokens)  # type: ignore[union-attr]


def drawn(count: int) -> list[Fact]:
    return DEVELOPMENT.draw(0, count, distractors=0)[0]


BASE = encode("".join(f"line {number} of a long text\n" for number in range(100)))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_spans_hold_the_facts_and_nothing_else_changes(depths: list[float]) -> None:
    facts = drawn(len(depths))
    tokens, planted = plant(
        BASE, list(zip(depths, facts, strict=True)), encode=encode, decode=decode
    )
    assert [found.fact for found in planted] == facts
    rest = list(tokens)
    for found in sorted(planted, key=lambda found: -found.first_token):
        assert decode(tokens[found.first_token : found.end_token]) == found.fact.text
        assert set(found.blocks) == {
            place // 32 for place in range(found.first_token, found.end_token)
        }
        del rest[found.first_token : found.end_token + 1]
    assert rest == BASE


def test_facts_stand_on_lines_of_their_own_near_their_depth() -> None:
    for depth in (0.0, 0.33, 0.5, 1.0):
        tokens, [found] = plant(BASE, [(depth, drawn(1)[0])], encode=encode, decode=decode)
        assert decode(tokens[found.first_token - 1 : found.first_token]) == "\n"
        assert decode(tokens[found.end_token : found.end_token + 1]) == "\n"
        assert abs(found.first_token - depth * len(BASE)) <= 30


def test_a_text_without_line_ends_gets_them() -> None:
    fact = drawn(1)[0]
    base = encode("word " * 400)
    tokens, [found] = plant(base, [(0.5, fact)], encode=encode, decode=decode)
    assert found.first_token == 1001
    assert decode(tokens) == f"{'word ' * 200}\n{fact.text}\n{'word ' * 200}"


def test_no_fact_stands_between_messages() -> None:
    message = [MARK, *encode("user\nfirst line\nsecond line\n"), MARK, *encode("\n")]
    base = message * 20
    for depth in (place / 40 for place in range(41)):
        tokens, [found] = plant(
            base, [(depth, drawn(1)[0])], encode=encode, decode=decode, avoid={MARK}
        )
        around = tokens[found.first_token - 3 : found.first_token]
        assert MARK not in around
        assert MARK not in tokens[found.end_token + 1 : found.end_token + 3]


def test_facts_that_meet_keep_their_order() -> None:
    facts = drawn(4)
    _, planted = plant(BASE, [(0.5, fact) for fact in facts], encode=encode, decode=decode)
    firsts = [found.first_token for found in planted]
    assert firsts == sorted(firsts)


def test_a_depth_outside_the_history_is_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        plant(BASE, [(1.5, drawn(1)[0])], encode=encode, decode=decode)


def test_synthetic_sessions_alternate_name_the_subjects_and_follow_their_seed() -> None:
    messages = synthetic_messages(5, 30, ["falconer", "griffin"])
    assert [message.role for message in messages] == ["user", "assistant"] * 31
    text = "\n".join(message.content for message in messages)
    assert "falconer" in text and "griffin" in text
    assert messages == synthetic_messages(5, 30, ["falconer", "griffin"])
    assert messages != synthetic_messages(6, 30, ["falconer", "griffin"])


def test_synthetic_sessions_say_none_of_the_values() -> None:
    text = "".join(m.content for m in synthetic_messages(1, 200, ["x"])).lower()
    for word in chain.from_iterable(facts.words + facts.people for facts in SETS):
        assert word.lower() not in text, word
