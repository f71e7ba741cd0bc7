"""Which tokens of a question are its own, and not the chat template's."""

from __future__ import annotations

from kvws.recall.own_words import own_words
from kvws.recall.text.spelling import Spelling


class Toy:
    """One token a piece of text, given as a list."""

    def __init__(self, *opening: str) -> None:
        self._texts: list[str] = []
        self.spelling = Spelling(lambda tokens: "".join(self._texts[t] for t in tokens), ())
        self.spelling = Spelling(self.spelling.decode, tuple(map(self._number, opening)))

    def _number(self, text: str) -> int:
        if text not in self._texts:
            self._texts.append(text)
        return self._texts.index(text)

    def own(self, *texts: str) -> list[str]:
        """Those of the tokens that count."""
        mask = own_words([self._number(text) for text in texts], self.spelling)
        assert mask.dtype == "uint8" and len(mask) == len(texts)
        return [text for text, own in zip(texts, mask, strict=True) if own]


def test_the_question_between_its_markers_is_what_counts() -> None:
    chat = Toy("<|im_start|>", "assistant")
    question = ("<|im_start|>", "user", "\n", "Which", " port", "?", "<|im_end|>")
    opened = ("<|im_start|>", "assistant", "\n")
    assert chat.own(*question, *opened) == ["Which", " port", "?"]


def test_blank_lines_of_what_is_said_count_but_not_those_behind_a_role() -> None:
    chat = Toy("<|im_start|>", "assistant")
    question = ("<|im_start|>", "user", "\n", "\n\n", "a", "\n", "b", "<|im_end|>")
    assert chat.own(*question) == ["a", "\n", "b"]


def test_every_message_of_a_question_is_read() -> None:
    chat = Toy("<|im_start|>", "assistant")
    first = ("<|im_start|>", "tool", "\n", "ok", "<|im_end|>")
    second = ("<|im_start|>", "user", "\n", "go", " on", "<|im_end|>")
    assert chat.own(*first, *second) == ["ok", "go", " on"]


def test_the_middle_of_a_message_counts_whole() -> None:
    chat = Toy("<|im_start|>", "assistant")
    assert chat.own("it", " is", "\n", " assistant") == ["it", " is", "\n", " assistant"]


def test_a_question_that_ends_in_the_middle_of_a_header_is_no_trouble() -> None:
    chat = Toy("<|im_start|>", "assistant")
    assert chat.own("a", "<|im_start|>") == ["a"]
    assert chat.own("a", "<|im_start|>", "user") == ["a"]
    assert chat.own() == []


def test_an_opening_without_a_marker_is_found_as_a_whole() -> None:
    chat = Toy("\n", "ASSISTANT", ":")
    said = ("\n", "hello", "\n", "ASSISTANT", " says")
    assert chat.own(*said, "\n", "ASSISTANT", ":", " ") == list(said), "half of it opens nothing"
    answered = ("\n", "ASSISTANT", ":", " ", "Yes", "\n", "ASSISTANT", " says")
    assert chat.own(*answered) == ["Yes", "\n", "ASSISTANT", " says"]


def test_without_an_opening_markers_are_known_by_their_looks() -> None:
    bare = Toy()
    said = ("[INST]", "list", "[", "0", "]", "<", "b", ">", "<>", "[]", " [/INST]", "</s>")
    assert bare.own(*said) == ["list", "[", "0", "]", "<", "b", ">", "<>", "[]"]


def test_a_role_of_another_length_than_the_assistants_takes_no_word_along() -> None:
    """Nor does an opening that goes on behind the role."""
    chat = Toy("<|im_start|>", "assist", "ant", "\n", "<think>", "\n\n", "</think>")
    question = ("<|im_start|>", "user", "\n", "Which", " port", " is", " it", "?", "<|im_end|>")
    assert chat.own(*question) == ["Which", " port", " is", " it", "?"]
    header = Toy("<|head|>", "assistant", "<|/head|>")
    question = ("<|head|>", "some", "body", "<|/head|>", "\n\n", "Which", " port", "<|eot|>")
    assert header.own(*question) == ["Which", " port"]


def test_blanks_between_messages_do_not_count() -> None:
    chat = Toy("<|im_start|>", "assistant")
    first = ("<|im_start|>", "tool", "\n", "ok", "\n", "<|im_end|>", "\n")
    second = ("<|im_start|>", "user", "\n", "go", "<|im_end|>", "\n")
    assert chat.own(*first, *second) == ["ok", "\n", "go"]


def test_the_end_of_the_message_before_does_not_count() -> None:
    """It is there because it did not fill a block."""
    chat = Toy("<|im_start|>", "assistant")
    before = (" of", " the", " log", "<|im_end|>", "\n")
    asked = ("<|im_start|>", "user", "\n", "Which", " port", "?", "<|im_end|>", "\n")
    assert chat.own(*before, *asked, "<|im_start|>", "assistant") == ["Which", " port", "?"]


def test_the_end_of_a_long_message_counts_when_nothing_was_said_behind_it() -> None:
    chat = Toy("<|im_start|>", "assistant")
    said = (" of", " the", " log", "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n")
    assert chat.own(*said) == [" of", " the", " log"]


def test_only_what_stands_before_the_first_message_is_the_one_befores_end() -> None:
    chat = Toy("<|im_start|>", "assistant")
    before = (" call", "</tool_call>", "<|im_end|>", "\n")
    first = ("<|im_start|>", "tool", "\n", "<b>", "ok", "<|im_end|>", "\n")
    second = ("<|im_start|>", "user", "\n", "go", " on", "<|im_end|>", "\n")
    assert chat.own(*before, *first, *second) == ["ok", "go", " on"]


def test_without_an_opening_nothing_tells_where_a_message_begins() -> None:
    assert Toy().own(" of", " the", "</s>", "[INST]", "go") == [" of", " the", "go"]


def test_another_marker_begins_no_message() -> None:
    chat = Toy("<|im_start|>", "assistant")
    assert chat.own("one", "<tool_call>", "two", "<|im_end|>") == ["one", "two"]


def test_a_begun_answer_does_not_take_the_question_away() -> None:
    """Its opening is the last header, and what is behind it is no message yet."""
    chat = Toy("\n", "ASSISTANT", ":")
    assert chat.own("hello", "\n", "ASSISTANT", ":", " ", "Yes") == ["hello", "Yes"]
