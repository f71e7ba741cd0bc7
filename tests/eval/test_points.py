"""Cutting: every recorded step is tested or accounted for, and asked as the product asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from kvws.blocks.key import BLOCK_TOKENS
from kvws.chat.message import Message
from kvws.errors import TraceError
from kvws.eval.points import (
    LEAST_HISTORY_TOKENS,
    LEAST_TURN_TOKENS,
    QUESTION_TOKENS,
    TURN_TOKENS,
    Cut,
    cut_trace,
    require_points,
)
from kvws.replay.trace import Trace, TraceStep

WINDOW = 3000


class WordRenderer:
    """A token per word, one in front of each message that names who speaks, one behind it."""

    def __init__(self, *, hides_old_turns: bool = False) -> None:
        self._ids: dict[str, int] = {}
        self._words: list[str] = []
        self._hides_old_turns = hides_old_turns

    def pieces(self, text: str, /) -> list[int]:
        return [self._id(word) for word in text.split()]

    def tokens(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> list[int]:
        found = [self._id(f"tool:{tool['name']}") for tool in tools for _ in range(1000)]
        for place, message in enumerate(messages):
            hidden = self._hides_old_turns and place < len(messages) - 2
            is_hidden = hidden and message.role == "assistant"
            words = [] if is_hidden else self.pieces(message.content)
            found += [self._id(f"<{message.role}>"), *words, self._id("<end>")]
        return [*found, self._id("<assistant>")] if add_generation_prompt else found

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(self._words[token] for token in token_ids)

    def _id(self, word: str) -> int:
        if word not in self._ids:
            self._ids[word] = len(self._words)
            self._words.append(word)
        return self._ids[word]


def words(name: str, count: int) -> str:
    return " ".join(f"{name}.{place}" for place in range(count))


def session(turns: int, *, turn_words: int = 60, result_words: int = 250) -> list[Message]:
    messages = [Message("system", words("system", 30)), Message("user", words("task", 50))]
    for turn in range(turns):
        messages += [
            Message("assistant", words(f"turn{turn}", turn_words)),
            Message("tool", words(f"result{turn}", result_words + 7 * turn)),
        ]
    return [*messages, Message("assistant", words("end", turn_words))]


def trace_of(threads: Mapping[str, Sequence[Message]], **fields: Any) -> Trace:
    steps = [
        TraceStep(name, place)
        for name, messages in threads.items()
        for place in range(1, len(messages))
        if messages[place].role == "assistant"
    ]
    frozen = {name: tuple(messages) for name, messages in threads.items()}
    return Trace("made up", "test", frozen, tuple(steps), **fields)


def cut(trace: Trace, *, points: int = 6, seed: int = 0, window: int = WINDOW) -> Cut:
    return cut_trace(trace, WordRenderer(), window_tokens=window, points=points, seed=seed)


LONG = trace_of({"main": session(60)})


@pytest.mark.parametrize("points", [1, 4, 6, 500])
def test_every_step_is_tested_or_accounted_for(points: int) -> None:
    found = cut(LONG, points=points)
    assert found.points + sum(found.left_out.values()) == len(LONG.steps)
    assert 0 < found.points <= points


def test_a_point_is_whole_blocks_then_a_question_then_the_recorded_turn() -> None:
    renderer = WordRenderer()
    found = cut_trace(LONG, renderer, window_tokens=WINDOW, points=500, seed=0)
    for episode in found.episodes:
        assert len(episode.tokens) <= WINDOW
        for point in episode.points:
            assert point.history % BLOCK_TOKENS == 0
            assert point.history >= LEAST_HISTORY_TOKENS
            assert 0 < point.question_tokens <= QUESTION_TOKENS
            assert LEAST_TURN_TOKENS <= point.turn_tokens <= TURN_TOKENS
            recorded = LONG.threads["main"][point.step]
            said = renderer.decode(episode.tokens[point.prompt : point.end])
            assert said == f"{recorded.content} <end>"
            assert renderer.decode(episode.tokens[: point.prompt]).endswith("<assistant>")


def test_few_new_tokens_are_asked_with_all_of_them() -> None:
    found = cut(trace_of({"main": session(40, result_words=20)}), points=1)
    (point,) = found.episodes[0].points
    asked = WordRenderer()
    assert point.question_tokens >= len(asked.pieces(words("result", 20)))
    assert point.question_tokens < 20 + 7 * 40 and point.turn_tokens == 61


def test_an_episode_begins_with_the_session_and_goes_on_at_a_turn() -> None:
    renderer = WordRenderer()
    found = cut_trace(LONG, renderer, window_tokens=WINDOW, points=12, seed=0)
    assert len(found.episodes) > 1
    for episode in found.episodes:
        text = renderer.decode(episode.tokens)
        assert text.startswith("<system> system.0") and "<user> task.0" in text
        assert LONG.threads["main"][episode.first_message].role == "assistant"


def test_points_are_spread_over_depths_and_drawn_by_seed() -> None:
    first, again, other = (cut(LONG, points=9, seed=seed) for seed in (1, 1, 2))
    assert first == again and first != other
    for episode in first.episodes:
        steps = [point.step for point in episode.points]
        assert len(set(steps)) == len(steps) == 3 and steps == sorted(steps)


def test_episodes_with_few_steps_are_made_up_for_by_others() -> None:
    wide = trace_of({"main": session(30, turn_words=100, result_words=800)})
    assert cut(wide, points=6, window=2400).points == 6


def test_a_long_task_keeps_a_quarter_of_the_window() -> None:
    messages = session(30)
    messages[1] = Message("user", words("task", 2500))
    renderer = WordRenderer()
    found = cut_trace(
        trace_of({"main": messages}), renderer, window_tokens=WINDOW, points=3, seed=0
    )
    said = renderer.decode(found.episodes[0].tokens).split()
    assert WINDOW // 8 < sum(word.startswith("task.") for word in said) <= WINDOW // 4
    assert sum(word.startswith("system.") for word in said) == 30  # a short one stays whole


def test_a_message_longer_than_the_window_is_stepped_over() -> None:
    messages = session(30)
    messages[31] = Message("tool", words("huge", 5000))
    found = cut(trace_of({"main": messages}), points=500)
    tested = {point.step for episode in found.episodes for point in episode.points}
    assert 32 not in tested and min(tested) < 30 and max(tested) > 34
    assert found.points + sum(found.left_out.values()) == 31


def test_the_step_before_a_compaction_is_always_tested_with_the_summary() -> None:
    summary = Message("user", words("summary", 400))
    compacted = [summary, *session(3)[2:]]
    for seed in range(5):
        found = cut(trace_of({"main": session(40), "main#2": compacted}), points=3, seed=seed)
        points = [point for episode in found.episodes for point in episode.points]
        with_summary = [point for point in points if point.summary]
        assert [point.step for point in with_summary] == [82]
        assert len(with_summary[0].summary) == 400


@pytest.mark.parametrize("turns", range(12, 22))
def test_the_end_of_a_compacted_thread_is_read_with_what_came_before(turns: int) -> None:
    threads = {"main": session(turns), "main#2": [Message("user", words("summary", 400))]}
    threads["main#2"] += session(1)[2:]
    trace = trace_of(threads)
    found = cut(trace, points=3)
    (last,) = [p for episode in found.episodes for p in episode.points if p.summary]
    assert last.step == 2 + 2 * turns and last.history > WINDOW // 2
    everything = cut(trace, points=500)
    assert everything.points + sum(everything.left_out.values()) == len(trace.steps)


def test_a_resumed_thread_has_no_summary_and_is_not_cut_twice() -> None:
    resumed = [*session(40)[:-1], Message("user", words("next", 200)), Message("assistant", "ok")]
    found = cut(trace_of({"main": session(40), "main#2": resumed}), points=500)
    assert {episode.thread for episode in found.episodes} == {"main#2"}
    assert not any(point.summary for episode in found.episodes for point in episode.points)


def test_a_sub_agent_is_cut_if_it_is_long_enough() -> None:
    threads = {"main": session(40), "agent-1": session(20), "agent-2": session(2)}
    found = cut(trace_of(threads), points=500)
    assert {episode.thread for episode in found.episodes} == {"main", "agent-1"}


def test_tools_are_shown_unless_they_leave_no_room() -> None:
    renderer = WordRenderer()
    for count, shown in ((1, True), (2, False)):
        tools = tuple({"name": f"t{number}"} for number in range(count))
        trace = trace_of({"main": session(20)}, tools=tools)
        found = cut_trace(trace, renderer, window_tokens=WINDOW, points=1, seed=0)
        assert ("tool:t0" in renderer.decode(found.episodes[0].tokens)) == shown


def test_prompts_that_the_template_rewrites_are_left_out() -> None:
    renderer = WordRenderer(hides_old_turns=True)
    found = cut_trace(LONG, renderer, window_tokens=WINDOW, points=500, seed=0)
    assert any("chat template" in why for why in found.left_out)


def test_nothing_to_test_is_said_with_its_reasons() -> None:
    short = cut(trace_of({"main": session(2)}))
    mute = cut(trace_of({"main": session(20, turn_words=3)}))
    with pytest.raises(TraceError, match=r"less than 1,024 tokens before .*less than 16 tokens"):
        require_points([short, mute])
    require_points([short, cut(LONG)])
