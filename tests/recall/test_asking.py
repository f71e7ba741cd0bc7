"""Whether a person asks for something, in messages as templates write them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvws.chat.message import Message, ToolCall
from kvws.chat.spelling import spelling_of
from kvws.recall.asking import asks
from kvws.recall.own_words import own_words
from tests.chat.templates import FAMILIES, bytes_and_pairs, make_renderer
from tests.recall.text.toys import Words

OPENING = "<|im_end|> <|im_start|> assistant"

SAID = (
    "Which port does it use ?",
    "[Image #1] what is it ?",
    "tell me the port of db.example .",
    "Use the port that we noted ( the second )",
    "fix src/app.py",
    "/tmp/x.py fails again !",
)
SHOWN = (
    "<tool_response> File created . </tool_response>",
    "<returncode>0</returncode> <output> what </output>",
    "[File: a.py] 1: x",
    "{ ok : true }",
    "no errors (Open file: a.py) bash-$",
    "EXECUTION RESULT of [bash]: [Command finished with exit code 0]",
)


def asked(text: str, *, knows_users: bool = True) -> bool:
    """Whether a question reads as asked; `knows_users`: how a user's message opens."""
    words = Words()
    spelling = words.spelling
    if knows_users:
        spelling = replace(spelling, user_opening=tuple(words("<|im_start|> user")))
    question = words(text)
    return asks(question, own_words(question, spelling), spelling)


@pytest.mark.parametrize("knows_users", [True, False])
@pytest.mark.parametrize("text", SAID)
def test_a_question_or_an_order_asks(text: str, knows_users: bool) -> None:
    message = f"<|im_start|> user {text} {OPENING}"
    assert asked(message, knows_users=knows_users)
    assert asked(f"Done . <|im_end|> {message}", knows_users=knows_users)


@pytest.mark.parametrize("text", SHOWN)
def test_a_result_in_the_users_name_asks_nothing(text: str) -> None:
    assert not asked(f"<|im_start|> user {text} {OPENING}")


def test_a_message_of_another_role_asks_nothing_however_it_reads() -> None:
    assert not asked(f"<|im_start|> tool File created . {OPENING}")
    assert not asked(f"<|im_start|> user do it <|im_end|> <|im_start|> tool Is it so ? {OPENING}")
    assert asked(f"<|im_start|> tool ok <|im_end|> <|im_start|> user go on {OPENING}")


def test_what_was_answered_before_is_no_trouble() -> None:
    before = "<|im_start|> assistant Is it so ? <|im_end|>"
    assert asked(f"{before} <|im_start|> user go on {OPENING}")
    assert asked(f"{before} <|im_start|> user go on <|im_end|>"), "without the answer's opening"
    result = f"<|im_start|> tool a {OPENING}"
    assert not asked(f"<|im_start|> user go on {OPENING} ls <|im_end|> {result}")


def test_where_no_opening_of_a_users_is_known_the_words_alone_tell() -> None:
    assert asked("go on with it .", knows_users=False)
    assert not asked("[ ok ]", knows_users=False)


def test_of_the_rest_of_a_message_the_words_alone_tell() -> None:
    assert asked(f"go on with it . {OPENING}")
    assert not asked(f"was created . </tool_response> bash-$ {OPENING}")


@pytest.mark.parametrize("knows_users", [True, False])
def test_silence_asks_nothing(knows_users: bool) -> None:
    assert not asked("", knows_users=knows_users)
    assert not asked(f"<|im_start|> user {OPENING}", knows_users=knows_users)
    assert not asked("<|im_start|> user", knows_users=knows_users)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_templates_tells_a_person_from_a_tool(
    family: str, tmp_path: Path
) -> None:
    renderer = make_renderer(tmp_path, FAMILIES[family], bytes_and_pairs())
    spelling = spelling_of(renderer)
    call = Message("assistant", "", (ToolCall("call00001", "touch", "{}"),))
    result = Message("tool", "The file is there now.", (), "touch", "call00001")
    before = (Message("user", "Hello."), Message("assistant", "Hello, what is it?"))

    def reads_as_asked(*messages: Message) -> bool:
        begin = len(renderer.tokens(messages[:-1], add_generation_prompt=False))
        question = renderer.tokens(messages)[begin - 4 :]
        return asks(question, own_words(question, spelling), spelling)

    assert reads_as_asked(*before, Message("user", "Make the file."))
    assert not reads_as_asked(*before, Message("user", "Make the file."), call, result)
