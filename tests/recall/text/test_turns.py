"""The assistant's turns of a line, and what came before them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvws.recall.text.spelling import Spelling
from kvws.recall.text.tree import ROOT, BlockTree
from kvws.recall.text.turns import Exchange, TurnIndex
from tests.recall.text.toys import BLOCK, byte_spelling, decode, spell

OPENING = "<|im_start|>assistant\n"
CHAT = "<|im_start|>user\nfix the test that fails today, please<|im_end|>\n"


def said(*texts: str) -> str:
    """Turns and what they were answered, in ChatML: the assistant's first."""
    roles = ("assistant", "user")
    return "".join(
        f"<|im_start|>{roles[number % 2]}\n{text}<|im_end|>\n" for number, text in enumerate(texts)
    )


def read(tokens: list[int], spelling: Spelling) -> tuple[TurnIndex, int]:
    """An index that read a line, and the line's last block."""
    tree = BlockTree()
    turns = TurnIndex(spelling, tree)
    head = ROOT
    for number in range(len(tokens) // BLOCK):
        tree.add(number, head, tokens[number * BLOCK : (number + 1) * BLOCK])
        turns.add(number, head)
        head = number
    return turns, head


def texts_of(exchanges: list[Exchange], tokens: list[int]) -> list[tuple[str, str]]:
    """Context and turn of every exchange."""
    return [
        (decode(tokens[e.context_begin : e.begin]), decode(tokens[e.begin : e.end]))
        for e in exchanges
    ]


def test_a_turn_ends_at_the_next_message_and_answers_all_since_the_turn_before() -> None:
    tokens = spell(CHAT + said("look", "a result", "edit", "ok, " * 20))
    turns, head = read(tokens, byte_spelling())
    assert texts_of(turns.exchanges(head), tokens) == [
        (CHAT, said("look")),
        (said("look", "a result"), said("edit")),
    ]


def test_a_turn_that_is_not_over_goes_on_to_the_end_of_the_line() -> None:
    tokens = spell(CHAT + OPENING + "word " * 30)
    turns, head = read(tokens, byte_spelling())
    [exchange] = turns.exchanges(head)
    assert exchange.goes_on and exchange.end == len(tokens) // BLOCK * BLOCK
    assert list(exchange.places) == list(range(exchange.begin // BLOCK, len(tokens) // BLOCK))


@pytest.mark.parametrize("shift", range(BLOCK))
def test_an_opening_is_found_wherever_the_border_cuts_it(shift: int) -> None:
    before = "<|im_start|>user\n" + "x" * (40 + shift)
    tokens = spell(before + said("look", "y" * 80))
    turns, head = read(tokens, byte_spelling())
    assert texts_of(turns.exchanges(head), tokens) == [(before, said("look"))]


def test_without_a_message_marker_a_turn_ends_at_the_next_one() -> None:
    spelling = byte_spelling("Assistant:")
    assert spelling.message_start is None
    tokens = spell("User: hi. Assistant: look. User: result. Assistant: edit. " + "z" * 64)
    turns, head = read(tokens, spelling)
    first, second = texts_of(turns.exchanges(head), tokens)
    assert first == ("User: hi. ", "Assistant: look. User: result. ")
    assert second[0] == first[1] and second[1].startswith("Assistant: edit. ")


def test_an_opening_that_begins_like_itself_is_found_after_a_false_start() -> None:
    spelling = byte_spelling("aab:")
    tokens = spell("x" * 28 + "aaab:" + "y" * 60)
    turns, head = read(tokens, spelling)
    assert [exchange.begin for exchange in turns.exchanges(head)] == [29]


def test_a_template_without_an_opening_has_no_turns() -> None:
    turns, head = read(spell(CHAT + said("look", "result") + "x" * 40), byte_spelling(""))
    assert turns.exchanges(head) == []
    assert turns.coming(head, spell(OPENING)) is None


@given(st.lists(st.text("ab ", max_size=90), min_size=1, max_size=8))
def test_turns_are_those_a_reader_of_the_text_finds(texts: list[str]) -> None:
    text = CHAT + said(*texts) + "<|im_start|>"
    tokens = spell(text)
    tokens = tokens[: len(tokens) // BLOCK * BLOCK]
    turns, head = read(tokens, byte_spelling())
    whole = decode(tokens)
    expected = [OPENING + piece.split("<|im_start|>")[0] for piece in whole.split(OPENING)[1:]]
    assert [turn for _, turn in texts_of(turns.exchanges(head), tokens)] == expected


def test_lines_that_fork_share_the_turns_before_the_fork_only() -> None:
    spelling = byte_spelling()
    common = spell(CHAT + said("look", "result"))
    common += spell("x" * (-len(common) % BLOCK))
    tree = BlockTree()
    turns = TurnIndex(spelling, tree)
    heads: list[int] = []
    number = 0
    fork = ROOT
    for branch in ("", said("edit", "ok"), said("give up", "no")):
        tokens = spell(branch) if branch else common
        tokens += spell("y" * (-len(tokens) % BLOCK))
        head = fork
        for begin in range(0, len(tokens), BLOCK):
            tree.add(number, head, tokens[begin : begin + BLOCK])
            turns.add(number, head)
            head, number = number, number + 1
        fork = head if not branch else fork
        heads.append(head)
    _, edit, give_up = (turns.exchanges(head) for head in heads)
    assert [exchange.turn for exchange in edit] == [0, 1]
    assert [exchange.turn for exchange in give_up] == [0, 2]
    assert edit[0] == give_up[0]


@pytest.mark.parametrize("opening", ["", OPENING])
@pytest.mark.parametrize("at_most", range(1, 5))
def test_only_the_newest_exchanges_are_looked_up_where_so_many_are_wanted(
    opening: str, at_most: int
) -> None:
    tokens = spell(CHAT + said("look", "a result", "edit", "ok", "run it", "passed", "done"))
    tokens += spell("x" * (-len(tokens) % BLOCK))
    turns, head = read(tokens, byte_spelling())
    everything = turns.exchanges(head)
    assert len(everything) == 4
    assert turns.exchanges(head, at_most) == everything[len(everything) - at_most :]
    question = spell(opening)
    whole, newest = turns.coming(head, question), turns.coming(head, question, at_most)
    assert whole is not None and newest is not None
    assert newest.earlier == whole.earlier[max(0, len(whole.earlier) - at_most) :]
    of_whole, of_newest = (
        (coming.context_begin, coming.context_end) for coming in (whole, newest)
    )
    assert of_newest == of_whole


class TestTheComingTurn:
    """What it answers: the latest turn and all that was said since."""

    line = spell(CHAT + said("look", "result", "edit", "o" * 90))

    def context(self, question: str, *, blocks: int | None = None) -> tuple[str, int] | None:
        """Text of what the coming turn answers, and the number of earlier turns in the line."""
        kept = self.line[: BLOCK * (len(self.line) // BLOCK if blocks is None else blocks)]
        turns, head = read(kept, byte_spelling())
        prompt = kept + spell(question)
        coming = turns.coming(head, spell(question))
        if coming is None:
            return None
        assert all(exchange.end <= len(kept) for exchange in coming.earlier)
        text = decode(prompt[coming.context_begin : coming.context_end])
        return text, len(coming.earlier)

    def test_is_opened_by_the_question(self) -> None:
        found = self.context("<|im_end|>\n" + OPENING)
        assert found is not None
        assert found[0].startswith(said("edit")) and found[0].endswith("oo<|im_end|>\n")
        assert found[1] == 2

    def test_may_follow_turns_that_are_no_blocks_yet(self) -> None:
        found = self.context("<|im_end|>\n" + said("run it", "passed") + OPENING)
        assert found == (said("run it", "passed"), 2)

    def test_may_follow_one_that_ends_in_the_question(self) -> None:
        turn_and_answer = said("edit " * 30, "done")
        tokens = spell(CHAT + turn_and_answer)
        cut = spell(CHAT)[:-1] + spell("edit " * 10)
        kept = tokens[: len(cut) // BLOCK * BLOCK]
        turns, head = read(kept, byte_spelling())
        coming = turns.coming(head, [*tokens[len(kept) :], *spell(OPENING)])
        assert coming is not None
        [exchange] = coming.earlier
        assert exchange.end == len(kept) and not exchange.goes_on
        assert decode(tokens[coming.context_begin : coming.context_end]) == turn_and_answer

    def test_may_have_begun(self) -> None:
        found = self.context("<|im_end|>\n" + OPENING + "I will")
        assert found is not None and found[0].startswith(said("edit"))

    def test_need_not_be_opened(self) -> None:
        found = self.context("<|im_end|>\n<|im_start|>user\nand now")
        assert found is not None
        assert found[0].startswith(said("edit")) and found[0].endswith("and now")

    def test_may_be_the_first_one(self) -> None:
        assert self.context(OPENING, blocks=1) is None

    def test_may_follow_a_first_one_that_is_no_block_yet(self) -> None:
        found = self.context("<|im_end|>\n" + said("look", "result") + OPENING, blocks=0)
        assert found == (said("look", "result"), 0)
