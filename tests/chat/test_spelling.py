"""How chat templates spell the opening of an assistant's turn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from kvws.chat.message import Message
from kvws.chat.render import ChatRenderer
from kvws.chat.spelling import spelling_of
from tests.chat.templates import FAMILIES, blank_first, bytes_and_pairs, make_renderer

TALK = (
    Message("user", "How much is it?"),
    Message("assistant", "A lot."),
    Message("user", "Why?"),
    Message("assistant", "Who knows?"),
)


def openings_in(renderer: ChatRenderer, opening: tuple[int, ...]) -> int:
    tokens = renderer.tokens(TALK, add_generation_prompt=False)
    ends = range(len(opening), len(tokens) + 1)
    return sum(tuple(tokens[end - len(opening) : end]) == opening for end in ends)


def test_the_packaged_model_opens_a_turn_with_its_marker_and_the_role(smollm2: Path) -> None:
    renderer = ChatRenderer(smollm2)
    spelling = spelling_of(renderer)
    assert spelling.decode(spelling.opening) == "<|im_start|>assistant"
    assert spelling.decode(spelling.user_opening) == "<|im_start|>user"
    assert spelling.message_start == spelling.opening[0]
    assert openings_in(renderer, spelling.opening) == 2
    assert openings_in(renderer, spelling.user_opening) == 2


@pytest.mark.parametrize("tokenizer", [bytes_and_pairs, blank_first])
@pytest.mark.parametrize(
    ("family", "opening", "of_users", "starts_messages"),
    [
        ("chatml", "<|im_start|>assistant", "<|im_start|>user", True),
        ("qwen2", "<|im_start|>assistant", "<|im_start|>user", True),
        ("llama3", "<|head|>assistant<|/head|>", "<|head|>user<|/head|>", True),
        ("qwen3", "<|im_start|>assistant", "<|im_start|>user", True),
        ("gemma", "<turn>model", "<turn>user", True),
        ("named answers", "<|im_start|>assistant", "<|im_start|>user", True),
        ("mistral", "", "[INST]", False),
    ],
)
def test_every_turn_of_a_family_begins_with_its_opening(
    family: str,
    opening: str,
    of_users: str,
    starts_messages: bool,
    tokenizer: Callable[[], Tokenizer],
    tmp_path: Path,
) -> None:
    renderer = make_renderer(tmp_path, FAMILIES[family], tokenizer())
    spelling = spelling_of(renderer)
    spelled = spelling.decode(spelling.opening).replace(" ", "")
    assert spelled == opening, "but for blanks, which one tokenizer writes between all letters"
    assert (spelling.message_start is not None) == starts_messages
    if opening:
        assert openings_in(renderer, spelling.opening) == 2
    assert spelling.decode(spelling.user_opening).replace(" ", "") == of_users
    assert openings_in(renderer, spelling.user_opening) == 2


def test_a_template_that_writes_texts_one_behind_the_other_has_no_opening(tmp_path: Path) -> None:
    bare = "{%- for message in messages %}{{ message.content + '\n' }}{% endfor %}"
    spelling = spelling_of(make_renderer(tmp_path, bare, bytes_and_pairs()))
    assert spelling.opening == () and spelling.message_start is None
    assert spelling.user_opening == ()


def test_a_role_in_plain_words_is_an_opening_but_starts_no_other_message(tmp_path: Path) -> None:
    plain = "{%- for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    renderer = make_renderer(tmp_path, plain, bytes_and_pairs())
    spelling = spelling_of(renderer)
    assert spelling.decode(spelling.opening) == "assistant:" and spelling.message_start is None
    assert spelling.user_opening == (), "no marker: where it begins cannot be told"
    assert openings_in(renderer, spelling.opening) == 2


def test_blanks_at_the_end_of_an_opening_are_the_answers(tmp_path: Path) -> None:
    """They may become one token with its beginning."""
    renderer = make_renderer(tmp_path, FAMILIES["chatml"], bytes_and_pairs())
    messages = (TALK[0], Message("assistant", "\nfirst an empty line"))
    tokens = renderer.tokens(messages, add_generation_prompt=False)
    opening = spelling_of(renderer).opening
    text = renderer.decode(tokens)
    assert "assistant\n\nfirst" in text
    assert any(tuple(tokens[at : at + len(opening)]) == opening for at in range(len(tokens)))
