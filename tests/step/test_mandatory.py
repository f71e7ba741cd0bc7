"""Steps that know the parts of their prompt: what stays in view, and what a probe asks with.

Set KVWS_SEED to repeat a run.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence

import pytest

from kvws.blocks.key import page_hashes
from kvws.engine.protocol import ClosedStep, GenerateRequest
from kvws.limits import Limits
from kvws.observe.step_report import report_from_plain, report_to_plain
from kvws.recall.plan import Action
from kvws.recall.regions import Reason
from kvws.recall.spans import PromptSpans, Span
from kvws.recalling import Question
from tests.step.session import Reply, Session, in_loop
from tests.step.simulated_engine import SimulatedEngine
from tests.step.test_long_run import Client, run

LIMITS = Limits(
    budget_tokens=512,
    reserve_tokens=256,
    sink_tokens=32,
    recent_tokens=128,
    query_tokens=64,
    probe_tokens=128,
)
BUDGET = LIMITS.budget_blocks
CAP = 3 * BUDGET // 4
NEWEST = LIMITS.recent_blocks // 2
SEED = int(os.environ.get("KVWS_SEED", "11"))

SYSTEM, OLD, TASK, TOOLS, ANSWER = 0, 2, 3, 4, 7
"""Topics. Generated tokens are about the last of them."""


class Agent:
    """A client whose prompt is a system prompt, an old talk, a task, and what came of it."""

    def __init__(self, *, system: float = 2, old: float = 20, task: float = 1, tools: float = 4):
        self.session = Session(
            SimulatedEngine(context_tokens=LIMITS.context_tokens, device_pages=96), limits=LIMITS
        )
        text = self.session.text
        self.prompt = text(SYSTEM, system)
        self.system = Span(0, len(self.prompt))
        self.prompt += text(OLD, old)
        begin = len(self.prompt)
        self.prompt += text(TASK, task)
        self.task = Span(begin, len(self.prompt))
        self.prompt += text(TOOLS, tools)
        self.steps = 0

    @property
    def spans(self) -> PromptSpans:
        return PromptSpans(
            system=self.system,
            task=self.task,
            trajectory=Span(self.task.end, len(self.prompt)),
        )

    async def step(self, topic: int, blocks: float, **more: object) -> Reply:
        self.prompt += self.session.text(topic, blocks)
        spans = more.pop("spans", self.spans)
        reply = await self.session.ask(self.prompt, spans=spans, **more)
        self.steps += 1
        await self.session.check(bits=self.steps % 10 == 1)
        self.prompt += reply.tokens
        return reply

    @property
    def line(self) -> tuple[int, ...]:
        return self.session.workspace.thread("main").line

    def line_asked(self, reply: Reply) -> tuple[int, ...]:
        """The line that the step recalled for: without its question."""
        return self.line[: (reply.report.prompt_tokens - reply.report.query_tokens) // 32]

    def blocks_of(self, span: Span) -> set[int]:
        return set(self.line[span.begin // 32 : -(-span.end // 32)])

    def requests(self, attempt: str) -> list[GenerateRequest]:
        return [r for r in self.session.engine.requests if r.rid.endswith(f".{attempt}")]


def in_view(reply: Reply, *reasons: Reason) -> list[int]:
    return [
        decision.block
        for decision in reply.report.decisions
        if decision.action is not Action.DROP and (not reasons or decision.reason in reasons)
    ]


@in_loop
async def test_system_prompt_task_and_trajectory_are_in_view_whatever_is_asked() -> None:
    agent = Agent(tools=8)
    reply = await agent.step(OLD, 0.5)
    view = in_view(reply)
    assert reply.report.recalled and len(view) == BUDGET
    assert agent.blocks_of(agent.system) | agent.blocks_of(agent.task) <= set(view)
    assert {*agent.line_asked(reply)[23:]} <= set(view), "the tools' answers"
    scored = in_view(reply, Reason.SCORE)
    assert set(scored) <= {*agent.line[2:22]} and len(scored) >= BUDGET - CAP
    assert reply.report.shrunk == {}
    forgetful = Agent(tools=8)
    without = await forgetful.step(OLD, 0.5, spans=PromptSpans())
    assert not forgetful.blocks_of(agent.task) & set(in_view(without)), "nor would it score"


@in_loop
async def test_a_view_of_many_parts_is_in_the_order_of_the_line() -> None:
    agent = Agent(old=30)
    for topic in (OLD, TOOLS, 5, OLD, TOOLS):
        reply = await agent.step(topic, 1.5)
        if not reply.report.unchanged:
            view = in_view(reply)
            places = [agent.line.index(block) for block in view]
            assert places == sorted(places) and len(set(places)) == BUDGET
    assert len(in_view(reply, Reason.TRAJECTORY)) > 4


@in_loop
async def test_two_hundred_tool_calls_after_one_request_are_never_refused() -> None:
    """And never push the request, the system prompt or the newest step out of view."""
    agent = Agent(old=0)
    shrunk: set[str] = set()
    for step in range(200):
        reply = await agent.step(TOOLS + step % 3, 0.3 + step % 4 / 2, max_new_tokens=6)
        if not reply.report.recalled:
            continue
        view = in_view(reply)
        assert agent.blocks_of(agent.system) | agent.blocks_of(agent.task) <= set(view)
        assert {*agent.line_asked(reply)[-NEWEST:]} <= set(view)
        pinned = in_view(reply, *set(Reason) - {Reason.SCORE, Reason.STILL_FITS})
        assert len(pinned) <= CAP
        shrunk |= reply.report.shrunk.keys()
    assert len(agent.line) > 200 and shrunk == {"trajectory"}
    assert reply.report.shrunk["trajectory"] > 100


@in_loop
async def test_a_system_prompt_larger_than_the_budget_keeps_its_head_and_competes() -> None:
    agent = Agent(system=40, old=0, task=1, tools=6)
    reply = await agent.step(SYSTEM, 2)
    head = in_view(reply, Reason.SINK, Reason.SYSTEM)
    assert head == list(agent.line[: CAP - NEWEST - 1])
    assert agent.blocks_of(agent.task) <= set(in_view(reply))
    scored = in_view(reply, Reason.SCORE)
    assert len(scored) == BUDGET - CAP and set(scored) <= {*agent.line[len(head) : 40]}
    assert reply.report.shrunk["system"] == 40 - len(head)
    plain = json.loads(json.dumps(report_to_plain(reply.report)))
    assert report_from_plain(plain) == reply.report
    with pytest.raises(ValueError):
        report_from_plain({**plain, "shrunk": {"system": "much"}})


@in_loop
async def test_a_step_of_five_tokens_still_asks_about_the_task() -> None:
    """The task is about something that was talked about long ago; the tool said "ok"."""
    for knows_the_task in (True, False):
        agent = Agent(old=0, task=0, tools=0)
        topics = agent.session.text
        agent.prompt += topics(TASK, 9) + topics(OLD, 25)
        begin = len(agent.prompt)
        agent.prompt += topics(TASK, 2)
        agent.task = Span(begin, len(agent.prompt))
        agent.prompt += topics(TOOLS, 6)
        agent.prompt = agent.prompt[: len(agent.prompt) // 32 * 32]
        agent.session.workspace.thread("main").kept_last_view = False
        spans = agent.spans if knows_the_task else PromptSpans(
            system=agent.system, trajectory=agent.spans.trajectory
        )
        await agent.session.ask_and_check(agent.prompt, spans=spans, keep_generated=False)
        agent.session.workspace.thread("main").kept_last_view = False
        reply = await agent.session.ask_and_check([*agent.prompt, *topics(6, 5 / 32)], spans=spans)
        assert reply.report.query_tokens <= 37
        talk = {*agent.line[2:11]}
        scored = set(in_view(reply, Reason.SCORE, Reason.STILL_FITS))
        assert (len(scored & talk) >= 4) == knows_the_task


@in_loop
async def test_the_task_is_asked_again_in_the_probe_only() -> None:
    agent = Agent(task=3)
    await agent.step(OLD, 0.5)
    agent.session.workspace.thread("main").kept_last_view = False
    named: set[str] = set()
    close_step = agent.session.engine.close_step

    async def closing(step: str, pages: Sequence[tuple[str, int, int]]) -> ClosedStep:
        named.update(name for name, _, _ in pages)
        return await close_step(step, pages)

    agent.session.engine.close_step = closing
    reply = await agent.step(OLD, 1.2)
    probe, answer = agent.requests("probe")[-1], agent.requests("answer")[-1]
    new = reply.report.query_tokens
    task = agent.prompt[agent.task.end - 64 : agent.task.end]
    window = LIMITS.probe_blocks * 32
    assert list(probe.token_ids[window : window + 64]) == task
    assert probe.token_ids[window + 64 :] == answer.token_ids[-new:]
    view = agent.session.workspace.tokens_of(in_view(reply))
    assert list(answer.token_ids[:-new]) == view
    line = agent.session.workspace.tokens_of(agent.line)
    assert line == agent.prompt[: len(line)]
    computed = page_hashes(probe.token_ids, probe.namespace)[LIMITS.probe_blocks :]
    assert len(computed) >= 2 and named and not named.intersection(computed)


@in_loop
async def test_a_task_is_not_asked_twice() -> None:
    """While it ends in the question itself."""
    agent = Agent(old=30, task=4, tools=0)
    agent.prompt = agent.prompt[:-20]
    agent.task = Span(agent.task.begin, len(agent.prompt))
    agent.session.workspace.thread("main").kept_last_view = False
    reply = await agent.session.ask_and_check(agent.prompt, spans=agent.spans)
    (probe,) = agent.requests("probe")
    assert len(probe.token_ids) == 32 * LIMITS.probe_blocks + reply.report.query_tokens


@in_loop
async def test_a_question_of_less_than_a_block_is_not_probed_as_if_it_were_the_answer() -> None:
    agent = Agent(task=3)
    await agent.step(OLD, 0.5)
    task = agent.prompt[agent.task.end - 64 : agent.task.end]
    short: set[bool] = set()
    for blocks in (2, 0.3, 0.4, 0.3, 0.4):
        agent.session.workspace.thread("main").kept_last_view = True
        reply = await agent.step(OLD, blocks)
        probe = agent.requests("probe")[-1]
        before = probe.token_ids[: -reply.report.query_tokens]
        is_short = reply.report.query_tokens < 32
        assert (probe.max_new_tokens == 0) == is_short
        assert (list(before[-64:]) == task) == is_short
        short.add(is_short)
    assert short == {True, False}


@pytest.mark.parametrize("room", [0, 1, 2, 9])
@in_loop
async def test_no_more_of_the_task_is_asked_again_than_fits_the_context(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent(task=3)
    await agent.step(OLD, 0.5)
    agent.session.workspace.thread("main").kept_last_view = False
    plenty = Limits.room_blocks

    def tight(limits: Limits, other_tokens: int) -> int:
        return min(LIMITS.probe_blocks + room, plenty(limits, other_tokens))

    monkeypatch.setattr(Limits, "room_blocks", tight)
    monkeypatch.setattr(Question, "room_blocks", BUDGET)
    reply = await agent.step(OLD, 0.5)
    probe = agent.requests("probe")[-1]
    again = len(probe.token_ids) - 32 * LIMITS.probe_blocks - reply.report.query_tokens
    assert again == 32 * min(room, 2)


@in_loop
async def test_the_task_s_rows_that_the_tree_kept_from_the_tap_are_probed_again() -> None:
    """A request sent again and again makes no block: window and task are in the tree."""
    agent = Agent(task=2)
    prompt = agent.prompt + agent.session.text(OLD, 0.9)
    spans = agent.spans
    thread = agent.session.workspace.thread("main")
    for _ in range(3):
        assert not agent.requests("reprobe")
        thread.kept_last_view = False
        reply = await agent.session.ask_and_check(prompt, spans=spans, max_new_tokens=1)
    (reprobe,) = agent.requests("reprobe")
    asked = len(reprobe.token_ids) - 32 * LIMITS.probe_blocks
    assert reprobe.compute_from == 32 * LIMITS.probe_blocks
    assert asked == 64 + reply.report.query_tokens
    assert set(in_view(reply, Reason.SCORE)) <= {*agent.line[2:22]}


class WithParts(Client):
    """Its prompts have parts, wherever; some are beyond the prompt, some overlap."""

    def spans(self, prompt_tokens: int) -> PromptSpans:
        def span() -> Span:
            begin = self.rng.randrange(prompt_tokens)
            return Span(begin, begin + self.rng.choice([0, 5, 40, 100, 300, 5000]))

        task = span()
        return PromptSpans(
            system=self.rng.choice([None, Span(0, self.rng.randrange(1, 400))]),
            policies=tuple(span() for _ in range(self.rng.randrange(3))),
            task=self.rng.choice([None, task, task, task]),
            trajectory=self.rng.choice([None, Span(task.end, prompt_tokens)]),
        )

    async def _ask(self, name: str) -> None:
        prompt = list(self.prompts[name])
        reply = await self.session.ask(
            prompt,
            thread=name,
            max_new_tokens=self.rng.choice([1, 3, 33]),
            keep_generated=self.rng.random() < 0.8,
            spans=self.spans(len(prompt)),
        )
        self.prompts[name] = prompt + reply.tokens


@pytest.mark.parametrize("seed", [SEED, SEED + 1])
@in_loop
async def test_random_sessions_with_parts_add_up_after_every_step(seed: int) -> None:
    print(f"seed {seed}")
    session = Session(
        SimulatedEngine(context_tokens=LIMITS.context_tokens, device_pages=90), limits=LIMITS
    )
    await run(WithParts(session, random.Random(seed)), 160)
    probes = [r for r in session.engine.requests if r.rid.endswith(".probe")]
    with_task = [
        r for r in probes
        if not r.max_new_tokens and len(r.token_ids) > 32 * LIMITS.probe_blocks + 64
    ]  # fmt: skip
    assert len(with_task) > 20
