"""The default selection on the real engine: what was said long ago is in view when it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvws.chat.message import Message
from kvws.chat.render import ChatRenderer
from kvws.chat.spelling import spelling_of
from kvws.engine.launch import RunningEngine
from kvws.engine.settings import EngineSettings
from kvws.limits import Limits
from kvws.models.profiles import find_profile
from kvws.observe.step_report import StepReport
from kvws.recall.plan import Action
from kvws.recall.recipe import FUSED, SignalName
from kvws.recall.regions import Reason
from kvws.recall.selector import Selector
from kvws.replay.loaders import load_trace
from kvws.session.workspace import Workspace
from kvws.step import StepRequest, finish_step, run_step
from tests.engine.asking import GREEDY
from tests.engine.timed import timed_engine

LIMITS = Limits(256, 256, 32, 64, 64)
FACT = "Note for later: the quartz ledger of the Lisbon branch listens on port 4127."


@pytest.fixture(scope="module")
def indexed(smollm2: Path) -> Iterator[RunningEngine]:
    """An engine whose ranks keep the index of the default recipe."""
    profile = find_profile(smollm2)
    assert profile is not None, "the packaged model's profile ships with the project"
    settings = EngineSettings(
        model=smollm2,
        context_tokens=LIMITS.context_tokens,
        host_bytes=1 << 30,
        signals=FUSED.rank_signals,
        profile=profile[1],
    )
    with timed_engine(settings) as engine:
        yield engine


def session_with_fact(renderer: ChatRenderer) -> list[int]:
    """A recorded session with one sentence of ours in it, and a question about it at the end."""
    trace = load_trace(Path(__file__).parents[2] / "traces" / "step-summary.traj.json")
    recorded = list(trace.threads["main"][:8])
    told = Message("user", FACT)
    asked = Message("user", "Which port does the quartz ledger of the Lisbon branch listen on?")
    heard = Message("assistant", "I will keep that in mind.")
    return renderer.tokens([*recorded[:4], told, heard, *recorded[4:], asked])


def test_a_fact_of_long_ago_is_in_view_and_its_reason_is_told(
    indexed: RunningEngine, smollm2: Path
) -> None:
    renderer = ChatRenderer(smollm2)
    prompt = session_with_fact(renderer)
    workspace = Workspace("fact")
    workspace.selector = Selector(FUSED, spelling_of(renderer))

    async def ask() -> StepReport:
        request = StepRequest("main", prompt, 1, keep_generated=False, sampling=GREEDY)
        return await finish_step(run_step(request, workspace, indexed.engine, LIMITS))

    report = indexed.run(ask())
    assert report.recalled and len(prompt) > 4 * LIMITS.budget_tokens
    assert set(report.signals) >= set(FUSED.rank_signals) | {SignalName.LEXICAL}
    in_view = {d.block: d for d in report.decisions if d.action is not Action.DROP}
    there = blocks_with("4127", workspace, renderer)
    told = [in_view[block] for block in there if block in in_view]
    assert told, "the number is not in view"
    assert {decision.reason for decision in told} & {Reason.ANCHOR, Reason.NEIGHBOUR}
    assert min(decision.ranks[SignalName.LEXICAL] for decision in told) < 4


def blocks_with(text: str, workspace: Workspace, renderer: ChatRenderer) -> list[int]:
    """Blocks of the main line that hold a text as a whole."""
    line = workspace.threads["main"].line
    return [block for block in line if text in renderer.decode(workspace.block_tokens(block))]
