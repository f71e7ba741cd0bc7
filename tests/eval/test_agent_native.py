"""What recorded agents look back at: found in the recording, and in views or not."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from kvws.blocks.key import BLOCK_TOKENS
from kvws.chat.message import Message, ToolCall
from kvws.chat.render import ChatRenderer
from kvws.chat.spelling import spelling_of
from kvws.cli.main import main
from kvws.engine.platform_entry import declare_torchvision_ops
from kvws.errors import TraceError
from kvws.eval.agent_figures import as_json, by_arm
from kvws.eval.agent_native import Found, Step, found_in_views, steps_of
from kvws.eval.arms import SINK_WINDOW, recipes_of
from kvws.eval.copied import CopySpan, Coverage, copy_spans, coverage, covered_tokens
from kvws.eval.episodes import (
    Episode,
    Turn,
    episodes,
    opening_of,
    require_episodes,
    sessions_of,
)
from kvws.eval.file_reads import reads_file
from kvws.recall.text.spelling import Spelling
from kvws.replay.loaders import load_trace
from kvws.replay.trace import Trace, TraceStep
from tests.eval.parrot import parrot

HISTORY_BLOCKS = 64
few_tokens = st.lists(st.integers(0, 3), max_size=24)


# What a turn repeats


def brute_force(earlier: Sequence[int], turn: Sequence[int], least: int) -> list[CopySpan]:
    def places(run: Sequence[int], text: Sequence[int]) -> list[int]:
        return [i for i in range(len(text) - len(run) + 1) if text[i : i + len(run)] == run]

    found: list[CopySpan] = []
    for begin in range(len(turn)):
        for end in range(begin + least, len(turn) + 1):
            sources = places(turn[begin:end], earlier)
            grows = (begin > 0 and places(turn[begin - 1 : end], earlier)) or (
                end < len(turn) and places(turn[begin : end + 1], earlier)
            )
            if sources and not grows and not places(turn[begin:end], turn[:begin]):
                found.append(CopySpan(begin, end, tuple(sources)))
    return found


@given(few_tokens, few_tokens, st.integers(1, 5))
@settings(max_examples=400)
def test_copied_runs_are_those_that_a_search_of_everything_finds(
    earlier: list[int], turn: list[int], least: int
) -> None:
    assert copy_spans(earlier, turn, least) == brute_force(earlier, turn, least)


def test_a_run_that_the_turn_has_said_before_is_in_sight_and_does_not_count() -> None:
    run = list(range(20))
    (span,) = copy_spans([99, *run], [7, *run, 8, *run])
    assert (span.begin, span.end, span.sources) == (1, 21, (1,))


def test_large_and_odd_token_ids_are_found_like_others() -> None:
    run = [0xD800 + n for n in range(12)] + [1_000_000]
    (span,) = copy_spans([5, *run, 6], [7, *run])
    assert (span.begin, span.end, span.sources) == (1, 14, (1,))


def test_a_copy_counts_with_the_blocks_that_hold_it() -> None:
    span = CopySpan(0, 40, (0, 50, 120))
    assert span.places(10) == [range(2), range(1, 3), range(3, 5)]
    assert span.places(4) == [range(2), range(1, 3), range(3, 4)]


def test_the_copy_that_is_most_in_view_counts() -> None:
    span = CopySpan(0, 40, (0, 320))
    assert coverage(span, {0, 10, 11}, 20) == Coverage(2, 2)
    assert coverage(span, {0}, 20) == Coverage(2, 1)
    assert not coverage(span, set(), 20).is_whole


def test_a_copy_in_the_question_is_in_view_whatever_the_view_is() -> None:
    assert coverage(CopySpan(0, 12, (0, 700)), set(), 20).is_whole


def test_tokens_of_overlapping_runs_are_covered_once() -> None:
    assert covered_tokens([CopySpan(0, 20, (3,)), CopySpan(10, 30, (9,))]) == 30


# What reads a file


def bash(command: str) -> Message:
    return Message("assistant", "", (ToolCall("1", "Bash", json.dumps({"command": command})),))


@pytest.mark.parametrize(
    "turn",
    [
        Message("assistant", "", (ToolCall("1", "Read", '{"file_path": "/a/b.py"}'),)),
        Message(
            "assistant",
            "",
            (ToolCall("1", "str_replace_editor", '{"command": "view", "path": "/a"}'),),
        ),
        bash("cat src/main.rs"),
        bash("cd /work && sed -n '10,40p' lib/core.ex | head -20"),
        bash("nl -ba setup.py"),
        Message("assistant", "Let me look.\n```bash\ncat -n django/utils/tz.py\n```"),
        Message("assistant", "<execute_ipython>\nopen_file('/w/src/App.css')\n</execute_ipython>"),
    ],
    ids=str,
)
def test_turns_that_show_themselves_a_file_are_recognised(turn: Message) -> None:
    assert reads_file(turn)


@pytest.mark.parametrize(
    "turn",
    [
        Message("assistant", "I will cat src/main.rs and open README.md next."),
        bash("ls -la src/"),
        bash("cat <<'EOF' > repro.py\nprint(1)\nEOF"),
        bash("concat a/b.txt"),
        bash("pytest tests/test_tail.py"),
        Message("assistant", "", (ToolCall("1", "Edit", '{"file_path": "/a/b.py"}'),)),
        Message("assistant", "", (ToolCall("1", "Bash", "not json: cat a.py"),)),
        Message("assistant", "", (ToolCall("1", "Bash", '["cat a.py"]'),)),
        Message(
            "assistant",
            "",
            (ToolCall("1", "str_replace_editor", '{"command": "create", "path": "/a"}'),),
        ),
    ],
    ids=str,
)
def test_turns_that_do_something_else_are_not(turn: Message) -> None:
    assert not reads_file(turn)


# Steps


def episode_with(
    turn: Sequence[int], *, answer: Sequence[int] = (), message: Message | None = None
) -> Episode:
    """64 blocks in which no token comes twice, one turn, and what its tools answered."""
    history = list(range(1000, 1000 + HISTORY_BLOCKS * BLOCK_TOKENS))
    tokens = (*history, *range(100, 140), *turn, *answer)
    begin = len(history) + 40
    said = message or Message("assistant", "said")
    own = Turn(said, len(history), begin, begin + len(turn), len(tokens), None)
    return Episode("made", "made", 0, tokens, (own,))


def words_of(place: int, count: int = 20) -> list[int]:
    """Tokens of the history from a place on."""
    return list(range(1000 + place, 1000 + place + count))


def test_a_step_looks_back_at_what_its_turn_repeats() -> None:
    (step,) = steps_of(episode_with([1, *words_of(320), 2, *words_of(700, 11), 3]))
    (wanted,) = step.wanted
    assert wanted.want == "copied" and len(wanted.spans) == 1
    assert step.history == HISTORY_BLOCKS * BLOCK_TOKENS
    assert wanted.spans[0].sources == (320,)
    assert step.at_stake(wanted, 12) == list(wanted.spans)


def test_what_a_window_of_the_same_size_holds_is_not_at_stake() -> None:
    """At 12 % of 64 blocks a window holds the first and the newest 7, at 50 % the newest 31."""
    (step,) = steps_of(episode_with([*words_of(0), 1, *words_of(57 * 32), 2, *words_of(34 * 32)]))
    (wanted,) = step.wanted
    assert len(wanted.spans) == 3
    assert [s.sources for s in step.at_stake(wanted, 12)] == [(34 * 32,)]
    assert step.at_stake(wanted, 50) == []


def test_a_turn_that_repeats_nothing_or_comes_too_early_is_no_step() -> None:
    assert steps_of(episode_with([1, 2, 3])) == []
    early = episode_with(words_of(0))
    turn = Turn(Message("assistant", "x"), 600, 640, 700, 700, None)
    assert steps_of(Episode("e", "e", 0, early.tokens, (turn,))) == []


def test_a_file_whose_content_is_there_is_read_again() -> None:
    reading = Message("assistant", "", (ToolCall("1", "Read", '{"file_path": "a.py"}'),))
    known = episode_with([1, 2], answer=[3, *words_of(320, 100), 4], message=reading)
    (step,) = steps_of(known)
    assert [wanted.want for wanted in step.wanted] == ["read again"]
    news = episode_with([1, 2], answer=[*words_of(320, 40), *range(200, 260)], message=reading)
    assert steps_of(news) == []
    assert steps_of(episode_with([1, 2], answer=words_of(320, 100))) == []


@pytest.fixture(scope="module")
def found() -> list[Found]:
    """Of one step that repeats three places, two of which a small window doesn't hold."""
    episode = episode_with([*words_of(320), 1, *words_of(1210, 30), 2, *words_of(2040, 12)])
    spelling = Spelling(lambda ids: "".join(f" word{token}" for token in ids))
    recipes = recipes_of([], with_profile=False)
    return list(
        found_in_views(
            parrot(), spelling, None, episode, steps_of(episode), recipes, (12, 25), seed=0
        )
    )


def test_every_arm_is_looked_into_at_every_budget(found: list[Found]) -> None:
    arms = {f.arm for f in found}
    assert {"auto", "mean-k", "lexical", SINK_WINDOW, "random"} <= arms
    assert len(found) == 2 * len(arms)
    assert {f.spans for f in found} == {2} and {f.blocks for f in found} <= {2, 3}


def test_the_window_never_holds_what_is_at_stake(found: list[Found]) -> None:
    of_window = [f for f in found if f.arm == SINK_WINDOW]
    assert of_window and all(f.spans_in_view == 0 for f in of_window)
    assert by_arm(found, "copied", 12)[SINK_WINDOW].steps_served.value == 0


def test_words_of_the_question_find_the_source_that_it_names() -> None:
    """The question holds five words of the block that the turn goes on to repeat."""
    base = episode_with(words_of(320))
    begin = HISTORY_BLOCKS * BLOCK_TOKENS
    tokens = (*base.tokens[:begin], *words_of(340, 5), *base.tokens[begin + 5 :])
    episode = Episode("made", "made", 0, tokens, base.turns)
    spelling = Spelling(lambda ids: "".join(f" word{token}" for token in ids))
    recipes = recipes_of([], with_profile=False)
    steps = steps_of(episode)
    seen = list(found_in_views(parrot(), spelling, None, episode, steps, recipes, (12,), seed=0))
    assert by_arm(seen, "copied", 12)["lexical"].steps_served.value == 1.0


def a_find(**changes: object) -> Found:
    find = Found(
        trace="t",
        format="f",
        episode=0,
        prompt_tokens=1,
        want="copied",
        is_beyond_compaction=False,
        budget_percent=12,
        arm="auto",
        spans=2,
        spans_in_view=1,
        blocks=4,
        blocks_in_view=3,
    )
    return replace(find, **changes)  # pyright: ignore[reportArgumentType]


def test_shares_are_of_all_spans_blocks_and_steps() -> None:
    finds = [
        a_find(),
        a_find(spans_in_view=2, blocks_in_view=4),
        a_find(spans=6, spans_in_view=0, blocks=12, blocks_in_view=0, is_beyond_compaction=True),
        a_find(want="read again"),
        a_find(budget_percent=25),
    ]
    of = by_arm(finds, "copied", 12)["auto"]
    assert (of.steps, of.spans, of.beyond_compaction) == (3, 10, 1)
    assert of.spans_in_view.value == pytest.approx(0.3)
    assert of.blocks_in_view.value == pytest.approx(7 / 20)
    assert of.steps_served.value == pytest.approx(1 / 3)


def test_a_report_tells_formats_apart() -> None:
    report = json.loads(json.dumps(as_json([a_find(), a_find(format="g")], (12,))))
    shares = report["figures"]["12"]["copied"]
    assert shares["all"]["auto"]["steps"] == 2 and shares["g"]["auto"]["steps"] == 1
    assert len(report["steps"]) == 2


# Episodes


@pytest.fixture(scope="module")
def renderer(smollm2: Path) -> ChatRenderer:
    declare_torchvision_ops()
    return ChatRenderer(smollm2)


def a_session(turns: int, words: str = "alpha beta gamma delta ") -> tuple[Message, ...]:
    messages = [Message("system", "Be good."), Message("user", "Do it.")]
    for turn in range(turns):
        messages += [
            Message("assistant", f"Turn {turn}: {words * 4}"),
            Message("user", f"Result {turn}: {words * 20}"),
        ]
    return tuple(messages)


def a_trace(threads: dict[str, tuple[Message, ...]]) -> Trace:
    return Trace("made", "made", threads, (TraceStep(next(iter(threads)), 2),))


def test_episodes_are_cut_at_messages_and_begin_with_the_first(renderer: ChatRenderer) -> None:
    trace = a_trace({"main": a_session(30)})
    cut = episodes(renderer, trace, window_tokens=900, least_tokens=500, at_most=99)
    assert len(cut) > 2
    for episode in cut:
        text = renderer.decode(episode.tokens)
        assert len(episode.tokens) <= 900
        assert text.startswith("<|im_start|>system\nBe good.") and text.endswith("<|im_end|>\n")
        for turn in episode.turns:
            prompt = renderer.decode(episode.tokens[: turn.begin])
            assert prompt.endswith(opening_of(renderer))
            said = renderer.decode(episode.tokens[turn.begin : turn.end])
            assert said == turn.message.content.strip() + " <|im_end|>\n" or said.startswith(
                "Turn"
            )
    turns = [turn.message.content for episode in cut for turn in episode.turns]
    assert turns == sorted(turns, key=lambda text: int(text.split()[1][:-1]))
    assert len(turns) == len(set(turns))


def test_an_episode_of_a_whole_session_is_what_the_template_writes(renderer: ChatRenderer) -> None:
    messages = a_session(5)
    (whole,) = episodes(
        renderer, a_trace({"main": messages}), window_tokens=8000, least_tokens=1, at_most=1
    )
    assert list(whole.tokens) == renderer.tokens(messages, add_generation_prompt=False)
    assert whole.turns[1].new_begin == whole.turns[0].end
    assert whole.turns[0].answered_end == whole.turns[0].end + len(
        renderer.tokens(messages[:4], add_generation_prompt=False)
    ) - len(renderer.tokens(messages[:3], add_generation_prompt=False))


def test_no_message_fills_an_episode(renderer: ChatRenderer) -> None:
    long = Message("user", "one two three " * 2000)
    trace = a_trace({"main": (*a_session(3), Message("assistant", "Go on."), long)})
    cut = episodes(renderer, trace, window_tokens=1200, least_tokens=1, at_most=9)
    assert all(len(episode.tokens) <= 1200 for episode in cut)
    assert renderer.decode(cut[-1].tokens).endswith("<|im_end|>\n")


def test_what_came_before_a_compaction_is_history_still(renderer: ChatRenderer) -> None:
    before, after = a_session(12), (Message("user", "Summary."), *a_session(12, "new words ")[2:])
    trace = a_trace({"main": before, "main#2": after, "agent-1": a_session(1)})
    main_line, aside = sessions_of(trace)
    assert [m for m, _ in main_line] == [*before, *after]
    assert [c for _, c in main_line] == [False] * len(before) + [True] * len(after)
    assert len(aside) == 4
    first, *_ = episodes(renderer, trace, window_tokens=1500, least_tokens=400, at_most=2)
    borders = {turn.compacted_at for turn in first.turns}
    assert len(borders) == 2 and None in borders
    border = max(b for b in borders if b is not None)
    assert renderer.decode(first.tokens[border:]).startswith("<|im_start|>user\nSummary.")


def test_a_resumed_thread_adds_only_what_is_new() -> None:
    before = a_session(3)
    resumed = (*before[:4], Message("user", "Other."), Message("assistant", "Yes."))
    (line,) = sessions_of(a_trace({"main": before, "main#2": resumed}))
    assert [m for m, _ in line] == [*before, *resumed[4:]]


def test_no_episode_at_all_is_refused() -> None:
    with pytest.raises(TraceError, match="no session is as long as 1024 tokens"):
        require_episodes([], 1024)


def test_the_opening_of_a_turn_is_known_to_retrieval(renderer: ChatRenderer) -> None:
    opening = spelling_of(renderer).opening
    assert renderer.decode(opening) + "\n" == opening_of(renderer) == "<|im_start|>assistant\n"


# Real sessions


def test_a_recorded_session_is_looked_into_from_the_command_line(
    smollm2: Path, tmp_path: Path
) -> None:
    """The repository's own recording, and the real model."""
    trace = Path(__file__).parents[2] / "traces" / "step-summary.traj.json"
    report = tmp_path / "report.json"
    result = CliRunner().invoke(
        main,
        [
            *("eval", "agent", str(trace), "--model", str(smollm2), "--budgets", "12"),
            *("--window", "2048", "--episodes", "1", "--json", str(report)),
        ],
    )
    assert result.exit_code == 0, result.output
    assert "copied, views of 12 % of the history" in result.output
    assert "read again, 12 %: in none of" in result.output
    arms = json.loads(report.read_text())["figures"]["12"]["copied"]["all"]
    assert arms["auto"]["spans"] >= 1
    assert arms[SINK_WINDOW]["spans_in_view"]["value"] == 0.0


def test_short_sessions_are_refused_with_a_hint(smollm2: Path, tmp_path: Path) -> None:
    path = tmp_path / "session.json"
    messages = [{"role": m.role, "content": m.content} for m in a_session(1)]
    path.write_text(json.dumps({"messages": messages}))
    result = CliRunner().invoke(main, ["eval", "agent", str(path), "--model", str(smollm2)])
    assert result.exit_code == 1, result.output
    assert "no session is as long as 1024 tokens" in result.output and "hint:" in result.output


@pytest.fixture
def shared_traces() -> Path:
    """Recorded sessions of real agents, which don't belong to this repository."""
    beside_repository = Path(__file__).resolve().parents[3] / "shared" / "traces"
    folder = Path(os.environ.get("KVWS_TRACES") or beside_repository)
    if not folder.is_dir():
        pytest.skip("no recorded sessions: set KVWS_TRACES to their folder")
    return folder


def test_real_sessions_hold_copies_that_windows_do_not(
    renderer: ChatRenderer, shared_traces: Path
) -> None:
    trace = load_trace(shared_traces / "mini_swe_agent" / "sphinx-doc__sphinx-9258.traj.json.xz")
    steps: list[Step] = []
    for episode in episodes(renderer, trace, window_tokens=6000, least_tokens=1024, at_most=6):
        steps += steps_of(episode)
    at_stake = [w.want for s in steps for w in s.wanted if s.at_stake(w, 25)]
    assert at_stake.count("copied") >= 10 and "read again" in at_stake
