"""Put together, the segments of any talk are the whole rendering, however it was told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvws.chat.message import Message
from kvws.chat.render import ChatRenderer
from kvws.chat.segments import SegmentRenderer
from tests.chat.talking import SCHEMA, answer, put_together, read, said, told_stepwise, user
from tests.chat.templates import FAMILIES

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
