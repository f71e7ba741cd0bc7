"""Recall on the real engine: scores, selection, and what happens when something goes wrong."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvws.blocks.page import PageSource
from kvws.engine.client import SglangEngine
from kvws.engine.launch import RunningEngine
from kvws.engine.protocol import Chunk, GenerateRequest
from kvws.engine.self_check import self_check
from kvws.errors import SelfCheckFailed
from kvws.limits import Limits
from kvws.recall.view import ExecutionView, Prompt
from kvws.session.workspace import Workspace
from kvws.step import StepRequest, run_step
from tests.engine.asking import GREEDY, Answer, ask_workspace
from tests.engine.oracle import Oracle

TIGHT = Limits(256, 256, 32, 64, 64)


def ask(
    running: RunningEngine,
    workspace: Workspace,
    token_ids: Sequence[int],
    *,
    engine: Any = None,
    count: int = 1,
    thread: str = "main",
) -> Answer:
    asked = ask_workspace(
        engine or running.engine,
        workspace,
        token_ids,
        TIGHT,
        count=count,
        watched=range(64),
        thread=thread,
    )
    return running.run(asked)


class Interfering:
    """The real engine, with one fault at a chosen call. Everything else goes through."""

    def __init__(self, engine: SglangEngine) -> None:
        self._engine = engine
        self.skip_promise_of: str | None = None
        self.forget_before_answer: tuple[str, list[int]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def promise(self, step: str, view: Sequence[tuple[str, PageSource]]) -> list[int]:
        if self.skip_promise_of == "next":
            self.skip_promise_of = None
            return []
        return await self._engine.promise(step, view)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        if self.forget_before_answer is not None and request.rid.endswith(".answer"):
            workspace, blocks = self.forget_before_answer
            self.forget_before_answer = None
            await self._engine.flush_device_cache()  # so that the answer must load its view
            await self._engine.forget(workspace, blocks)
        stream = self._engine.generate(request)
        try:
            async for chunk in stream:
                yield chunk
        finally:
            await stream.aclose()


@pytest.fixture
def workspace(
    running: RunningEngine, text: list[int], request: pytest.FixtureRequest
) -> Workspace:
    """A session three times its budget."""
    workspace = Workspace(request.node.name)
    ask(running, workspace, text[:768])
    return workspace


def test_scores_are_the_published_equation_on_the_raw_queries_and_keys_of_transformers(
    running: RunningEngine, smollm2: Path, text: list[int]
) -> None:
    history, query = text[:320], text[320:352]
    workspace = Workspace("scores")
    limits = Limits(512, 512, 32, 64, 64)
    running.run(ask_workspace(running.engine, workspace, [*history, 0], limits))
    scores = running.run(_scores(running.engine, workspace, query))
    expected = _published_scores(Oracle(str(smollm2)), history, query)
    assert torch.allclose(torch.tensor(scores), expected, atol=5e-5), (
        torch.tensor(scores) - expected
    )
    assert scores[0] == scores[9] == 0.0, "sink and recent do not compete"
    assert abs(sum(scores) - len(query)) < 1e-3, "each query token spends a probability of one"


async def _scores(engine: SglangEngine, workspace: Workspace, query: Sequence[int]) -> list[float]:
    """Mean-K scores over blocks 1 … 8 of ten, asked on the whole history."""
    view = ExecutionView.of_blocks(range(10))
    prompt = Prompt.compose(view, query, workspace.namespace, workspace.block_tokens)
    rid = "scores.probe"
    await engine.open_step("scores", workspace.name)
    await engine.promise("scores", prompt.promised_pages())
    await engine.watch_queries(rid, view.tokens)
    request = GenerateRequest(rid, "scores", workspace.namespace, prompt.token_ids, 0)
    async for _ in engine.generate(request):
        pass
    first_positions = workspace.first_positions[:10].tobytes()
    scores = await engine.score(
        rid, workspace.name, bytes([0, *[1] * 8, 0]), first_positions, view.tokens
    )
    await engine.close_step("scores", [])
    assert scores.rows == len(query)
    return scores.by_signal["mean-k"].tolist()


@torch.no_grad()
def _published_scores(
    oracle: Oracle, history: Sequence[int], query: Sequence[int]
) -> torch.Tensor:
    """KVMem's R_b, written out with the model's own projections, on means in half precision."""
    raw: dict[tuple[int, str], torch.Tensor] = {}
    hooks = [
        getattr(layer.self_attn, f"{name}_proj").register_forward_hook(
            lambda _m, _i, out, at=(number, name): raw.__setitem__(at, out[0].clone())
        )
        for number, layer in enumerate(oracle.model.model.layers)
        for name in "qk"
    ]
    oracle.model(torch.tensor([[*history, *query]]))
    for hook in hooks:
        hook.remove()
    total = torch.zeros(10)
    layers, heads, kv_heads, dim = 30, 9, 3, 64
    for layer in range(layers):
        q = raw[layer, "q"][len(history) :].view(-1, heads, dim)
        k = raw[layer, "k"][: len(history)].view(10, 32, kv_heads, dim).mean(1).half().float()
        for head in range(heads):
            logits = q[:, head] @ k[1:9, head // 3].T / dim**0.5
            total[1:9] += logits.softmax(-1).sum(0)
    return total / (layers * heads)


def test_a_session_beyond_its_budget_is_answered_from_a_bounded_view(
    running: RunningEngine, workspace: Workspace, text: list[int]
) -> None:
    answer = ask(running, workspace, text[:800], count=3)
    report = answer.report
    assert report is not None and report.recalled
    assert report.view_blocks <= TIGHT.room_blocks(report.query_tokens)
    line = workspace.threads["main"].line
    view = workspace.threads["main"].view
    assert view[0] == line[0], "the sink is first"
    assert line[-1] in view, "what was just read is in view"
    assert len(answer.tokens) == 3


def test_a_selection_that_changes_nothing_costs_one_pass(
    running: RunningEngine, text: list[int]
) -> None:
    workspace = Workspace("unchanged")
    ask(running, workspace, text[:250])
    ask(running, workspace, text[:300])  # fits no longer, but the room beside the view holds it
    report = ask(running, workspace, text[:340]).report
    assert report is not None and report.recalled and report.unchanged
    assert report.passes == 1
    assert report.computed_tokens == report.new_tokens


def test_a_question_asked_twice_is_probed_with_all_its_rows(
    running: RunningEngine, workspace: Workspace, text: list[int]
) -> None:
    """The tree then holds the query's pages, and would not compute their rows again."""
    first = ask(running, workspace, text[:830], count=4)
    again = ask(running, workspace, text[:830], count=4)
    assert again.report is not None and again.report.retries == 0
    assert len(again.tokens) == len(first.tokens) == 4


def test_a_lost_block_costs_a_prefill_of_its_tokens_and_no_wrong_answer(
    running: RunningEngine, workspace: Workspace, text: list[int]
) -> None:
    ask(running, workspace, text[:800])
    line = workspace.threads["main"].line
    lost = [line[0], line[-1]]  # the sink and the newest: every view holds them
    running.run(running.engine.flush_device_cache())
    running.run(running.engine.forget(workspace.name, lost))
    after = ask(running, workspace, text[:810], count=4)
    assert after.report is not None and after.report.repaired_blocks == len(lost)
    assert len(after.tokens) == 4
    held = running.run(running.engine.stats())[0]
    assert held["open_steps"] == 0 and held["staged_pages_now"] == 0


def test_a_block_lost_between_promise_and_load_fails_the_load_and_the_step_recovers(
    running: RunningEngine, workspace: Workspace, text: list[int]
) -> None:
    engine = Interfering(running.engine)
    engine.forget_before_answer = (workspace.name, list(range(workspace.block_count)))
    answer = ask(running, workspace, text[:860], engine=engine, count=3)
    assert answer.report is not None
    assert answer.report.retries == 1 and answer.report.repaired_blocks >= 1
    assert len(answer.tokens) == 3


def test_a_view_that_the_engine_recomputed_as_text_is_discarded_with_its_namespace(
    running: RunningEngine, workspace: Workspace, text: list[int]
) -> None:
    engine = Interfering(running.engine)
    running.run(running.engine.flush_device_cache())
    namespace = workspace.namespace
    engine.skip_promise_of = "next"
    answer = ask(running, workspace, text[:800], engine=engine, count=3)
    assert answer.report is not None and answer.report.retries == 1
    assert workspace.namespace != namespace
    assert len(answer.tokens) == 3, "nothing of the discarded answer was handed out"


def test_two_threads_at_once_share_the_workspace_and_store_their_common_prefix_once(
    running: RunningEngine, text: list[int]
) -> None:
    workspace = Workspace("threads")
    prefix = text[:512]
    ask(running, workspace, [*prefix, 5], thread="main")
    stored = workspace.block_count

    async def both() -> list[Answer]:
        return await asyncio.gather(
            *(
                ask_workspace(
                    running.engine, workspace, [*prefix, *text[at : at + 200]], TIGHT, thread=name
                )
                for name, at in (("main", 1000), ("agent-1", 2000))
            )
        )

    running.run(both())
    own_blocks = workspace.block_count - stored
    assert own_blocks <= 2 * (200 // 32), "the prefix was stored again"
    main, agent = (workspace.threads[name].line for name in ("main", "agent-1"))
    assert main[: len(prefix) // 32] == agent[: len(prefix) // 32]


def test_a_caller_that_leaves_early_leaves_nothing_open(
    running: RunningEngine, workspace: Workspace, text: list[int]
) -> None:
    async def leave_after_the_first_chunk() -> None:
        request = StepRequest("main", text[:830], 64, sampling=GREEDY)
        outputs = run_step(request, workspace, running.engine, TIGHT)
        await anext(outputs)
        await outputs.aclose()

    running.run(leave_after_the_first_chunk())
    held = running.run(running.engine.stats())[0]
    assert held["open_steps"] == held["staged_pages_now"] == held["watched_requests"] == 0
    assert len(ask(running, workspace, text[:830], count=2).tokens) == 2


def test_generated_tokens_become_blocks_without_being_computed_again(
    running: RunningEngine, text: list[int]
) -> None:
    workspace = Workspace("generated")
    prompt = text[:100]
    request = StepRequest("main", prompt, 64, sampling=GREEDY)

    async def generate() -> list[int]:
        outputs = run_step(request, workspace, running.engine, TIGHT)
        return [t async for out in outputs if isinstance(out, Chunk) for t in out.token_ids]

    generated = running.run(generate())
    report = ask(running, workspace, [*prompt, *generated, *text[200:210]]).report
    assert report is not None
    kept = (len(prompt) + len(generated) - 1) // 32 * 32
    assert report.new_tokens == len(prompt) + len(generated) + 10 - kept


def test_a_tap_that_delivers_nothing_ends_the_step_with_a_reason(
    running: RunningEngine, workspace: Workspace, text: list[int]
) -> None:
    class Blind(Interfering):
        async def watch_queries(self, rid: str, first_position: int) -> None:
            pass

    with pytest.raises(SelfCheckFailed, match="query rows"):
        ask(running, workspace, text[:900], engine=Blind(running.engine))


def test_the_start_up_check_refuses_an_engine_whose_tap_delivers_nothing(
    running: RunningEngine,
) -> None:
    class Blind(Interfering):
        async def watch_queries(self, rid: str, first_position: int) -> None:
            pass

    shape = {"dtype": "float32", "host_format": "exact"}
    with pytest.raises(SelfCheckFailed, match="tap"):
        running.run(self_check(Blind(running.engine), [shape]))
    running.run(running.engine.drop_workspace("self-check"))


def test_random_sessions_keep_host_bytes_equal_to_blocks(
    running: RunningEngine, rng: random.Random, text: list[int]
) -> None:
    workspace = Workspace("random")
    length = 100
    before = running.run(running.engine.stats())[0]
    for _ in range(6):
        length += rng.randrange(1, 200)
        ask(running, workspace, text[:length])
    after = running.run(running.engine.stats())[0]
    blocks = after["blocks"] - before["blocks"]
    assert blocks == workspace.block_count
    grown = after["host_used_bytes"] - before["host_used_bytes"]
    assert grown == blocks * running.engine.block_bytes
