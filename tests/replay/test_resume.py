"""A replay that was interrupted goes on, and reports what an uninterrupted one would."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from kvws.chat.message import Message
from kvws.cli.main import main
from kvws.errors import ConfigError
from kvws.recall.recipe import Recipe, recipe_named
from kvws.recall.selector import Selector
from kvws.replay.report import as_json, print_report
from kvws.replay.run import ReplayedStep, ReplayOptions, SessionReplay, workspace_name
from kvws.replay.trace import Trace, TraceStep
from kvws.replay.watching import watched_steps
from kvws.store.directory import StoreDirectory
from kvws.store.identity import ModelIdentity
from kvws.store.posix import PosixStorage
from tests.step.session import LIMITS, in_loop, text
from tests.step.simulated_engine import SimulatedEngine

IDENTITY = ModelIdentity("simulated", "aa", "bb", "float32", 2, 1, 8, 1, 32)
NAME = "replay-a-session"


class TopicRenderer:
    """Renders "topic blocks" as that many blocks of tokens, always the same."""

    def tokens(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
        tokens: list[int] = []
        for number, message in enumerate(messages):
            topic, blocks = message.content.split()
            rng = random.Random(f"{number} {message.content}")
            tokens += text(int(topic), float(blocks), rng)
        return tokens


def recorded(*turns: str) -> Trace:
    messages: list[Message] = []
    steps: list[TraceStep] = []
    for turn in turns:
        messages += [Message("user", turn), Message("assistant", "7 0.2")]
        steps.append(TraceStep("main", len(messages) - 1))
    return Trace("a-session", "test", {"main": tuple(messages)}, tuple(steps))


TRACE = recorded("1 14.3", "1 0.4", "2 7.6", "1 1.1", "5 4", "2 0.6")


class Lives:
    """One store, one life of the process after another."""

    def __init__(self, root: Path, options: ReplayOptions | None = None) -> None:
        self.root = root
        self.options = options or ReplayOptions()
        root.mkdir(exist_ok=True)
        storage = PosixStorage(root)
        self.engine = SimulatedEngine(context_tokens=LIMITS.context_tokens, storage=storage)
        self.store = StoreDirectory.open(root, storage)

    def end(self) -> None:
        self.store.close()
        self.engine = self.engine.restarted()
        self.store = StoreDirectory.open(self.root, PosixStorage(self.root))

    async def begin(self, *, resume: bool) -> SessionReplay:
        return await SessionReplay.open(
            TRACE,
            TopicRenderer(),  # type: ignore[arg-type]
            self.engine,
            LIMITS,
            self.options,
            selector=Selector(recipe_named("mean-k")),
            name=NAME,
            store=self.store,
            identity=IDENTITY,
            resume=resume,
        )

    async def run(
        self, *, resume: bool = False, steps: int = 99, lines: Path | None = None
    ) -> tuple[SessionReplay, list[ReplayedStep]]:
        """That many steps, then the end of the process."""
        replay = await self.begin(resume=resume)
        done: list[ReplayedStep] = []
        async with aclosing(watched_steps(replay, lines)) as outputs:
            async for step in outputs:
                done.append(step)
                if len(done) == steps:
                    break
        self.end()
        return replay, done

    @property
    def log(self) -> Path:
        return self.store.workspace_path(NAME) / "session.log"


def told(step: ReplayedStep) -> dict[str, Any]:
    """All that must not depend on interruptions."""
    report = step.report
    return {
        "number": step.number,
        "blocks": step.blocks_total,
        "decisions": report.decisions,
        "counts": [
            report.thread, report.prompt_tokens, report.new_tokens, report.query_tokens,
            report.computed_tokens, report.generated_tokens, report.view_blocks,
            report.recalled, report.unchanged,
        ],
    }  # fmt: skip


async def uninterrupted(root: Path) -> list[dict[str, Any]]:
    _, steps = await Lives(root).run()
    return [told(step) for step in steps]


@in_loop
async def test_an_interrupted_replay_ends_like_one_that_was_not(tmp_path: Path) -> None:
    expected = await uninterrupted(tmp_path / "whole")
    assert len(expected) == 6 and sum(bool(step["decisions"]) for step in expected) > 3
    for interrupted_after in range(1, 7):
        root = tmp_path / str(interrupted_after)
        lives = Lives(root)
        await lives.run(steps=interrupted_after)
        replay, steps = await lives.run(resume=True)
        assert [told(step) for step in steps] == expected
        assert [step.restored for step in steps] == [n < interrupted_after for n in range(6)]
        resumption = replay.resumption(steps)
        assert resumption is not None
        assert resumption.steps == interrupted_after and resumption.recomputed_blocks == 0
        assert resumption.blocks == steps[interrupted_after - 1].blocks_total


@in_loop
async def test_a_step_interrupted_in_its_ingest_goes_on_where_it_was(tmp_path: Path) -> None:
    expected = await uninterrupted(tmp_path / "whole")
    root = tmp_path / "torn"
    lives = Lives(root)
    await lives.run(steps=3)
    resumed_tokens = []
    for cut in (600, 500, 900):
        lives.log.write_bytes(lives.log.read_bytes()[:-cut])
        _, steps = await lives.run(resume=True, steps=3)
        assert [told(step) for step in steps] == expected[:3]
        resumed_tokens.append(sum(step.report.resumed_tokens for step in steps))
    assert any(resumed_tokens)
    _, steps = await lives.run(resume=True)
    assert [told(step)["counts"] for step in steps] == [step["counts"] for step in expected]


@in_loop
async def test_a_finished_replay_is_told_again_at_once(tmp_path: Path) -> None:
    lives = Lives(tmp_path)
    _, first = await lives.run()
    replay, again = await lives.run(resume=True)
    assert lives.engine.requests == [] and replay.skipped_steps == 0
    assert all(step.restored for step in again)
    assert [replace(step, restored=False) for step in again] == first


@in_loop
async def test_a_stored_replay_is_not_continued_by_accident(tmp_path: Path) -> None:
    lives = Lives(tmp_path)
    await lives.run(steps=2)
    before = lives.log.read_bytes()
    with pytest.raises(ConfigError) as refused:
        await lives.begin(resume=False)
    assert "--resume" in refused.value.hint and NAME in refused.value.hint
    assert lives.log.read_bytes() == before


@in_loop
async def test_resuming_nothing_begins_at_the_beginning(tmp_path: Path) -> None:
    replay, steps = await Lives(tmp_path).run(resume=True)
    assert len(steps) == 6 and not any(step.restored for step in steps)
    assert replay.resumption(steps) is None


@in_loop
async def test_steps_left_out_are_left_out_again(tmp_path: Path) -> None:
    options = ReplayOptions(max_tokens=32 * 26)
    lives = Lives(tmp_path, options)
    whole, steps = await lives.run()
    again, told_again = await lives.run(resume=True)
    assert whole.skipped_steps == again.skipped_steps > 0
    assert list(map(told, told_again)) == list(map(told, steps))


@in_loop
async def test_a_resumed_replay_may_go_further(tmp_path: Path) -> None:
    lives = Lives(tmp_path, ReplayOptions(max_steps=2))
    _, two = await lives.run()
    lives.options = ReplayOptions(max_steps=4)
    _, four = await lives.run(resume=True)
    assert len(two) == 2 and len(four) == 4 and four[1].restored and not four[2].restored


@in_loop
async def test_what_was_not_measured_before_the_end_is_missing_and_no_more(
    tmp_path: Path,
) -> None:
    """The process ended between the step's commit and the note behind it."""
    lives = Lives(tmp_path)
    await lives.run(steps=2)
    lives.log.write_bytes(lives.log.read_bytes()[:-1])
    replay, steps = await lives.run(resume=True, steps=2)
    assert steps[0].tiers is not None and steps[1].tiers is None
    resumption = replay.resumption(steps)
    output = StringIO()
    print_report(
        Console(file=output, width=170), TRACE, LIMITS, steps, skipped_steps=0,
        resumption=resumption, token_bytes={"host": 46080.0, "disk": 12672.0},
    )  # fmt: skip
    assert "a token takes 46,080 bytes on host, 12,672 bytes on disk" in output.getvalue()
    assert "resumed: 2 steps restored" in output.getvalue()
    assert "0 acknowledged blocks computed again" in output.getvalue()
    report = as_json(
        TRACE, "m", LIMITS, steps, skipped_steps=0, resumption=resumption, token_bytes={}
    )
    report = json.loads(json.dumps(report))
    assert report["resumed"]["steps"] == 2 and report["resumed"]["recomputed_blocks"] == 0
    assert report["steps"][1]["tier_bytes"] is None and report["steps"][1]["restored"]


@in_loop
async def test_a_line_is_written_as_each_step_ends(tmp_path: Path) -> None:
    store, lines = tmp_path / "store", tmp_path / "lines"
    lives = Lives(store)
    replay = await lives.begin(resume=False)
    async with aclosing(watched_steps(replay, lines)) as outputs:
        for number in range(1, 4):
            await anext(outputs)
            written = [json.loads(line) for line in lines.read_text().splitlines()]
            assert [line["number"] for line in written] == list(range(1, number + 1))
    lives.end()
    _, steps = await lives.run(resume=True, lines=lines)
    written = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [line["number"] for line in written] == [1, 2, 3, 1, 2, 3, 4, 5, 6]
    assert [line["restored"] for line in written] == [False] * 3 + [True] * 3 + [False] * 3
    assert written[3]["acknowledged_blocks"] == steps[2].blocks_total
    for line in written:
        assert line["acknowledged_blocks"] <= steps[-1].blocks_total


@in_loop
async def test_at_its_end_everything_is_acknowledged(tmp_path: Path) -> None:
    lives = Lives(tmp_path)
    replay = await lives.begin(resume=False)
    async for _ in watched_steps(replay):
        pass
    assert await lives.engine.unsaved_blocks(NAME) == 0
    lives.end()
    replay = await lives.begin(resume=True)
    blocks = replay.workspace.registered_blocks
    assert replay.restored.blocks == blocks == len(replay.workspace.acknowledged_before) > 20


def test_only_a_replay_that_would_do_the_same_has_the_same_name() -> None:
    options = ReplayOptions()

    recipe = recipe_named("auto")

    def name(
        trace: bytes, model: str, limits: Any, options: ReplayOptions, recipe: Recipe = recipe
    ) -> str:
        return workspace_name(TRACE, trace, model, limits, options, recipe)

    same = name(b"x", "m", LIMITS, options)
    assert same.startswith("replay-a-session-")
    assert same == name(b"x", "m", LIMITS, replace(options, max_steps=3, compare_every=2))
    others = {
        name(b"y", "m", LIMITS, options),
        name(b"x", "n", LIMITS, options),
        name(b"x", "m", replace(LIMITS, recent_tokens=96), options),
        name(b"x", "m", LIMITS, replace(options, max_tokens=9)),
        name(b"x", "m", LIMITS, replace(options, generate_tokens=9)),
        name(b"x", "m", LIMITS, options, recipe_named("mean-k")),
    }
    assert len(others) == 6 and same not in others
    odd = replace(TRACE, name="a\n" + 300 * "ä")
    assert len(workspace_name(odd, b"", "m", LIMITS, options, recipe)) < 300
    assert workspace_name(odd, b"", "m", LIMITS, options, recipe).isprintable()


def test_resuming_without_a_store_is_an_error_with_a_hint(tmp_path: Path) -> None:
    trace = tmp_path / "session.json"
    trace.write_text("{}")
    result = CliRunner().invoke(main, ["replay", str(trace), "--resume"])
    lines = result.output.splitlines()
    assert result.exit_code == 1 and len(lines) == 2
    assert "resumed" in lines[0] and "--disk-dir" in lines[1]
