"""Message by message: put together, segments are the whole rendering, however long the rest is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvws.chat.message import Message, ToolCall
from kvws.chat.render import ChatRenderer
from kvws.chat.segments import SegmentRenderer, Segments
from kvws.errors import PromptError
from tests.chat import templates
from tests.chat.templates import (
    CHATML,
    FAMILIES,
    GEMMA,
    blank_first,
    bytes_and_pairs,
    make_renderer,
)

SCHEMA = {
    "type": "function",
    "function": {
        "name": "Read",
        "description": "Reads a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}
NOT_THINKING = {"enable_thinking": False}


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SegmentRenderer]:
    return {
        name: SegmentRenderer(
            make_renderer(tmp_path_factory.mktemp("model"), template, bytes_and_pairs())
        )
        for name, template in FAMILIES.items()
    }


def renderer(folder: Path, template: str) -> SegmentRenderer:
    return SegmentRenderer(make_renderer(folder, template, bytes_and_pairs()))


def put_together(segments: Segments) -> tuple[int, ...]:
    return tuple(id_ for ids in (*segments.messages, segments.opening) for id_ in ids)


def user(text: str) -> Message:
    return Message("user", text)


def said(text: str, *calls: ToolCall, reasoning: str = "") -> Message:
    return Message("assistant", text, calls, reasoning=reasoning)


def read(number: int) -> ToolCall:
    return ToolCall(f"c{number:08d}", "Read", f'{{"path": "file {number}"}}')


def answer(number: int, text: str) -> Message:
    return Message("tool", text, name="Read", tool_call_id=f"c{number:08d}")


TALK = (
    Message("system", "Be brief."),
    user("Look."),
    said("Reading.", read(1)),
    answer(1, "x = 1\n"),
    said("", read(2)),
    answer(2, "x = 2\n"),
    said("It sets x."),
    user("Thanks."),
)


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


TEXTS = st.one_of(
    st.sampled_from(["", " ", "word", " two words\n", "x\n", "\n\ntext", "user", "\U0001f600"]),
    st.sampled_from(
        [
            "<|im_end|>\n<|im_start|>user\n",
            "</tool_response>\n<tool_response>\n",
            "<think>\nhm\n</think>\n\nso",
            "k7v2w9s4",
            "<tool_response>\nnot mine\n</tool_response>",
        ]
    ),
    st.text("ab \n", max_size=8),
)


@st.composite
def rounds(draw: st.DrawFn, *, parallel: bool, thinking: bool) -> list[Message]:
    """An assistant's turn, and the tools' or the user's answer to it."""
    calls = draw(st.integers(0, 3 if parallel else 1))
    turn = said(
        draw(TEXTS),
        *(read(n) for n in range(calls)),
        reasoning=draw(st.sampled_from(["", "Hm."])) if thinking else "",
    )
    if calls:
        answers = [answer(n, draw(TEXTS)) for n in range(calls)]
        noted = draw(st.sampled_from(["", "", "Mind the time."]))
        return [turn, *answers, *([Message("system", noted)] if noted else [])]
    return [replace(turn, content=turn.content or "Yes."), user(draw(TEXTS))]


@st.composite
def talks(
    draw: st.DrawFn, *, parallel: bool = True, thinking: bool = False
) -> list[list[Message]]:
    """The prompts' new messages, prompt by prompt; most of the talk is repetition."""
    system = draw(st.sampled_from([[], [Message("system", "Be brief.")]]))
    some = draw(st.lists(rounds(parallel=parallel, thinking=thinking), min_size=1, max_size=4))
    order = draw(st.lists(st.sampled_from(some), max_size=4))
    steps = [[*system, user(draw(TEXTS))], *some * draw(st.sampled_from([1, 1, 2, 8])), *order]
    for number in reversed(range(2, len(steps))):
        if draw(st.integers(0, 9)) == 0:  # two rounds that are told at once
            steps[number - 1 : number + 1] = [steps[number - 1] + steps[number]]
    return steps


def told_stepwise(
    renderer: SegmentRenderer, steps: list[list[Message]], tools: list[dict[str, object]]
) -> tuple[tuple[int, ...] | None, list[Message]]:
    """The segments of all steps put together, or None where one has none; and the messages."""
    messages: list[Message] = []
    ids: tuple[int, ...] = ()
    opening: tuple[int, ...] = ()
    for step in steps:
        known = len(messages)
        messages = [*messages, *step]
        segments = renderer.segments(messages, tools, known)
        if segments is None:
            return None, messages
        assert len(segments.messages) == len(step)
        if 0 < known < 30:
            assert as_generated(renderer, messages, tools, known, segments) in (None, segments)
        ids += put_together(replace(segments, opening=()))
        opening = segments.opening
    return ids + opening, messages


def as_generated(
    renderer: SegmentRenderer,
    messages: list[Message],
    tools: list[dict[str, object]],
    known: int,
    segments: Segments,
) -> Segments | None:
    """What is told where the step's first message, the assistant's, is known as it was made; with
    that message's own segment put back."""
    rest = renderer.segments(messages, tools, known + 1)
    if rest is None or not segments.messages[0]:
        return None
    return replace(rest, messages=(segments.messages[0], *rest.messages))


@pytest.mark.parametrize("family", ["chatml", "qwen2", "named answers"])
@settings(max_examples=25, deadline=None)
@given(talks(), st.booleans())
def test_step_by_step_gives_the_whole(
    families: dict[str, SegmentRenderer], family: str, steps: list[list[Message]], with_tools: bool
) -> None:
    tools: list[dict[str, object]] = [SCHEMA] * with_tools
    told, messages = told_stepwise(families[family], steps, tools)
    assert told == families[family].whole(messages, tools)


@settings(max_examples=25, deadline=None)
@given(talks(parallel=False), st.booleans())
def test_step_by_step_gives_the_whole_where_turns_call_once(
    families: dict[str, SegmentRenderer], steps: list[list[Message]], with_tools: bool
) -> None:
    tools: list[dict[str, object]] = [SCHEMA] * with_tools
    told, messages = told_stepwise(families["llama3"], steps, tools)
    assert told == families["llama3"].whole(messages, tools)


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma", "llama3"])
@settings(max_examples=25, deadline=None)
@given(talks(thinking=True), st.booleans())
def test_where_there_are_segments_they_are_the_whole(
    families: dict[str, SegmentRenderer], family: str, steps: list[list[Message]], with_tools: bool
) -> None:
    tools: list[dict[str, object]] = [SCHEMA] * with_tools
    told, messages = told_stepwise(families[family], steps, tools)
    if told is not None:
        assert told == families[family].whole(messages, tools)


@pytest.mark.parametrize("family", list(FAMILIES))
@settings(max_examples=15, deadline=None)
@given(talks(thinking=True), st.booleans())
def test_a_whole_history_at_once(
    families: dict[str, SegmentRenderer], family: str, steps: list[list[Message]], with_tools: bool
) -> None:
    messages = [message for step in steps for message in step]
    tools = [SCHEMA] * with_tools
    segments = families[family].segments(messages, tools, 0)
    if segments is None:  # there, equal messages make a difference
        assert family == "mistral"
    else:
        assert put_together(segments) == families[family].whole(messages, tools)


@settings(max_examples=15, deadline=None)
@given(talks())
def test_smollm2_step_by_step(
    smollm2_segments: SegmentRenderer, steps: list[list[Message]]
) -> None:
    told, messages = told_stepwise(smollm2_segments, steps, [SCHEMA])
    assert told == smollm2_segments.whole(messages, [SCHEMA])


@pytest.fixture(scope="module")
def smollm2_segments(smollm2: Path) -> SegmentRenderer:
    return SegmentRenderer(ChatRenderer(smollm2))


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
