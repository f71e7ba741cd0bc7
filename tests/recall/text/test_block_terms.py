"""A name that a block border cuts is whole on both sides."""

from __future__ import annotations

import pytest

from kvws.recall.text.block_terms import BlockTerms, block_terms
from tests.recall.text.toys import decode, spell


def read(before: str, block: str) -> BlockTerms:
    return block_terms(decode, spell(before), spell(block))


def test_a_block_between_blanks_says_what_it_says() -> None:
    assert read("before ", "then after") == BlockTerms(["then", "after"])


def test_the_first_block_of_a_line_has_nothing_before_it() -> None:
    assert read("", "a first block") == BlockTerms(["a", "first", "block"])


def test_a_cut_name_is_whole_and_tells_the_block_before_its_rest() -> None:
    said = read("get the ser", "vice now")
    assert said.own == ["service", "now"]
    assert said.completed == "service"
    assert said.beyond == ("service",)


def test_a_cut_path_tells_only_what_its_beginning_did_not() -> None:
    said = read("x src/ap", "p.py")
    assert set(said.own) == {"src/app.py", "src", "app.py", "app", "py"}
    assert set(said.beyond) == {"src/app.py", "app.py", "app", "py"}


def test_a_name_that_ends_at_the_border_is_not_the_next_blocks() -> None:
    assert read("the end", " of it") == BlockTerms(["of", "it"])


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_character_cut_at_the_border_makes_no_junk(cut: int) -> None:
    data = spell("ab né🙂 cd")
    before, block = data[: 3 + cut], data[3 + cut :]
    said = block_terms(decode, before, block)
    assert set(said.own) <= {"né", "cd"}
    if cut in (1, 2):  # within the word: behind its first letter, within its second
        assert said.completed == "né" and said.beyond == ("né",)


def test_a_character_cut_at_the_beginning_of_the_seam_makes_no_junk() -> None:
    data = spell("né is so")
    assert data[-7:-6] == spell("é")[1:]
    assert block_terms(decode, data[-7:], spell(" here")).own == ["here"]


def test_pairs_of_an_unspaced_script_span_the_border_and_no_more() -> None:
    said = block_terms(decode, spell("读取"), spell("文件名"))
    assert said.own == ["取文", "文件", "件名"]
    assert said.completed == "取文" and said.beyond == ("取文",)
