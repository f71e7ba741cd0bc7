"""A list told message by message: where each ends, what needs the whole, and what it costs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvws.chat.message import Message
from kvws.chat.segments import SegmentRenderer
from kvws.errors import PromptError
from tests.chat import templates
from tests.chat.talking import (
    SCHEMA,
    TALK,
    answer,
    put_together,
    read,
    said,
    told_stepwise,
    user,
)
from tests.chat.templates import (
    CHATML,
    FAMILIES,
    GEMMA,
    blank_first,
    bytes_and_pairs,
    make_renderer,
)

NOT_THINKING = {"enable_thinking": False}


def renderer(folder: Path, template: str) -> SegmentRenderer:
    return SegmentRenderer(make_renderer(folder, template, bytes_and_pairs()))


def text_of(renderer: SegmentRenderer, ids: Sequence[int]) -> str:
    tokenizer = renderer._renderer._tokenizer
    return tokenizer.decode(list(ids))


class TestWhereMessagesEnd:
    def test_each_message_has_its_own_text(self, families: dict[str, SegmentRenderer]) -> None:
        segments = families["chatml"].segments(TALK[:4], [], 0)
        assert segments is not None
        texts = [text_of(families["chatml"], ids) for ids in segments.messages]
        assert texts == [
            "<|im_start|>system\nBe brief.<|im_end|>\n",
            "<|im_start|>user\nLook.<|im_end|>\n",
            "<|im_start|>assistant\nReading.\n"
            '<tool_call>\n{"name": "Read", "arguments": {"path": "file 1"}}\n</tool_call>'
            "<|im_end|>\n",
            "<|im_start|>user\n<tool_response>\nx = 1\n\n</tool_response><|im_end|>\n",
        ]
        assert text_of(families["chatml"], segments.opening) == "<|im_start|>assistant\n"

    def test_the_first_message_carries_tools_and_default_prompts(
        self, families: dict[str, SegmentRenderer]
    ) -> None:
        segments = families["qwen2"].segments(TALK[1:2], [SCHEMA], 0)
        assert segments is not None
        text = text_of(families["qwen2"], segments.messages[0])
        assert text.startswith("<|im_start|>system\n# Tools") and "Reads a file." in text
        assert text.endswith("<|im_start|>user\nLook.<|im_end|>\n")

    def test_tools_may_come_behind_known_messages(self, tmp_path: Path) -> None:
        late = renderer(
            tmp_path,
            "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
            "{% if loop.index < 3 and message.role == 'user' %}{{ tools | tojson }}{% endif %}"
            "{{ message.content + '<|im_end|>' }}{% endfor %}",
        )
        segments = late.segments(TALK[:2], [SCHEMA], 1)
        assert segments is not None
        assert text_of(late, segments.messages[0]).count("Reads a file.") == 1
        assert (
            put_together(segments) == late.whole(TALK[:2], [SCHEMA])[-len(segments.messages[0]) :]
        )

    def test_tool_answers_in_one_turn_share_a_segment(
        self, families: dict[str, SegmentRenderer]
    ) -> None:
        talk = [*TALK[:2], said("", read(1), read(2)), answer(1, "one"), answer(2, "two")]
        segments = families["qwen2"].segments(talk, [SCHEMA], 2)
        assert segments is not None
        assert segments.messages[1] == ()
        assert text_of(families["qwen2"], segments.messages[2]) == (
            "<|im_start|>user\n<tool_response>\none\n</tool_response>\n"
            "<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        )

    def test_a_further_answer_in_a_known_turn_needs_the_whole(
        self, families: dict[str, SegmentRenderer]
    ) -> None:
        talk = [*TALK[:2], said("", read(1), read(2)), answer(1, "one"), answer(2, "two")]
        assert families["qwen2"].segments(talk, [], 4) is None
        assert families["llama3"].segments(TALK[:4], [], 3) is not None

    def test_tools_that_move_to_the_last_question_need_the_whole(
        self, families: dict[str, SegmentRenderer]
    ) -> None:
        assert families["mistral"].segments(TALK, [SCHEMA], 6) is None
        assert families["mistral"].segments(TALK, [], 6) is not None
        loop = families["mistral"].segments(TALK[:6], [SCHEMA], 4)
        assert loop is not None and all(loop.messages)

    def test_nothing_new_is_only_an_opening(self, families: dict[str, SegmentRenderer]) -> None:
        segments = families["qwen3"].segments(TALK, [SCHEMA], len(TALK), NOT_THINKING)
        assert segments is not None and segments.messages == ()
        text = text_of(families["qwen3"], segments.opening)
        assert text == "<|im_start|>assistant\n<think>\n\n</think>\n\n"

    def test_refused_messages(self, tmp_path: Path) -> None:
        refusing = renderer(tmp_path, "{{ raise_exception('never') }}")
        with pytest.raises(PromptError, match="never"):
            refusing.segments(TALK, [], 0)
        with pytest.raises(PromptError, match="never"):
            refusing.whole(TALK, [])


class TestThinking:
    """The template keeps reasoning only since the last question."""

    LOOP = (
        user("Look."),
        said("", read(1), reasoning="First the file."),
        answer(1, "x = 1"),
        said("It sets x.", reasoning="Easy."),
    )

    def test_stays_while_tools_are_called(self, families: dict[str, SegmentRenderer]) -> None:
        segments = families["qwen3"].segments(self.LOOP[:3], [], 2)
        assert segments is not None
        assert "First the file." in text_of(
            families["qwen3"], families["qwen3"].whole(self.LOOP[:3], [])
        )

    def test_goes_with_the_next_question_and_the_whole_is_needed(
        self, families: dict[str, SegmentRenderer]
    ) -> None:
        assert families["qwen3"].segments([*self.LOOP, user("And y?")], [], 4) is None
        answered = [self.LOOP[0], self.LOOP[3], user("And y?")]
        assert families["qwen3"].segments(answered, [], 2) is None
        then_silent = [*self.LOOP[:3], said("It sets x."), user("And y?")]
        assert families["qwen3"].segments(then_silent, [], 4) is None

    def test_without_any_the_next_question_is_only_appended(
        self, families: dict[str, SegmentRenderer]
    ) -> None:
        talk = [replace(message, reasoning="") for message in self.LOOP]
        segments = families["qwen3"].segments([*talk, user("And y?")], [], 4)
        assert segments is not None
        assert text_of(families["qwen3"], segments.messages[0]) == (
            "<|im_start|>user\nAnd y?<|im_end|>\n"
        )

    def test_a_whole_history_has_every_boundary(
        self, families: dict[str, SegmentRenderer]
    ) -> None:
        history = [*self.LOOP, user("And y?"), said("No."), user("Sure?")]
        segments = families["qwen3"].segments(history, [SCHEMA], 0)
        assert segments is not None and all(segments.messages)
        assert put_together(segments) == families["qwen3"].whole(history, [SCHEMA])


class TestClosing:
    @pytest.mark.parametrize(
        ("family", "closing"),
        [
            ("chatml", "<|im_end|>\n"),
            ("qwen3", "<|im_end|>\n"),
            ("llama3", "<|eot|>"),
            ("mistral", "</s>"),
            ("gemma", "</turn>\n"),
        ],
    )
    def test_is_what_follows_an_answer(
        self, families: dict[str, SegmentRenderer], family: str, closing: str
    ) -> None:
        ids = families[family].closing()
        assert ids is not None and text_of(families[family], ids) == closing

    def test_none_where_it_depends_on_what_follows(self, tmp_path: Path) -> None:
        template = (
            "{% for message in messages %}{{ '<turn>' + message.content }}"
            "{{ '.' if loop.last else '</turn>' }}{% endfor %}"
        )
        assert renderer(tmp_path, template).closing() is None


class TestTokenizers:
    def test_one_that_marks_where_a_text_begins(self, tmp_path: Path) -> None:
        tight = templates.MISTRAL.replace("' ' + (message", "(message")
        model = make_renderer(tmp_path, tight, blank_first())
        segments = SegmentRenderer(model)
        steps = [[*TALK[:2]], [*TALK[2:4]], [*TALK[4:8]], [said("Good."), user("Bye.")]]
        told, messages = told_stepwise(segments, steps, [])
        assert told is not None and told == segments.whole(messages, [])

    def test_one_whose_turns_end_in_plain_text_has_no_segments(self, tmp_path: Path) -> None:
        model = make_renderer(tmp_path, CHATML, bytes_and_pairs(), hard=("<|other|>",))
        assert SegmentRenderer(model).segments(TALK, [], 2) is None


class TestTemplatesThatLookFurther:
    def test_one_that_counts_messages_has_no_segments(self, tmp_path: Path) -> None:
        counting = CHATML.replace("message.role +", "message.role + (loop.index | string) +")
        assert renderer(tmp_path, counting).segments(TALK, [], 4) is None

    def test_one_that_forgets_what_is_far_back_has_no_segments(self, tmp_path: Path) -> None:
        forgetting = CHATML.replace(
            "message.content +", "(message.content if loop.revindex < 9 else '') +"
        )
        assert renderer(tmp_path, forgetting).segments(TALK, [], 4) is None

    def test_one_that_moves_something_to_the_last_question_has_segments_until_the_next_one(
        self, tmp_path: Path
    ) -> None:
        moving = CHATML.replace(
            "message.content +",
            "('Now: ' if message.role == 'user' and (messages | selectattr('role', 'equalto', "
            "'user') | list)[-1] == message else '') + message.content +",
        ).replace("message.role +", "(message.role + message.tool_calls | string) +")
        segments = renderer(tmp_path, moving)
        assert segments.segments(TALK[:4], [], 2) is not None
        assert segments.segments(TALK, [], 7) is None

    def test_a_form_that_only_the_new_messages_need_needs_the_whole(self, tmp_path: Path) -> None:
        segments = renderer(tmp_path, GEMMA)
        talk = [user("One."), said("Yes."), user("Two.")]
        assert segments.segments(talk, [], 2) is not None
        assert segments.segments([*talk, user("Three.")], [], 3) is None
        assert segments.segments([Message("system", "Brief."), *talk], [], 3) is not None


def long_session(messages: int) -> list[Message]:
    session = [Message("system", "Be brief. " * 2000), user("Fix all. " * 20)]
    number = 0
    while len(session) < messages:
        number += 1
        session += [said("Next." * 10, read(number)), answer(number, "line of output\n" * 120)]
    return session


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_step_costs_the_same_however_long_the_history_is(
    families: dict[str, SegmentRenderer], family: str
) -> None:
    def seconds(count: int) -> float:
        session = [*long_session(count), said("", read(0)), answer(0, "done"), user("Good.")]
        best = 1.0
        for _ in range(5):
            began = time.process_time()
            families[family].segments(session, [SCHEMA] * 24, len(session) - 3)
            best = min(best, time.process_time() - began)
        return best

    seconds(40)
    assert seconds(2000) < 5 * seconds(40) + 0.02
