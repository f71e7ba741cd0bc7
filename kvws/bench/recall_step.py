"""What a recall step costs, beside the same view prefilled again as text.

All figures are times to the first token in one run on one engine, so that their ratios hold on a
machine whose speed varies.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.table import Table

from kvws.blocks.key import BLOCK_TOKENS
from kvws.engine.client import SglangEngine
from kvws.limits import Limits
from kvws.observe.step_report import StepReport
from kvws.recall.recipe import Recipe
from kvws.recall.selector import Selector
from kvws.replay.baselines import cold_text_ms
from kvws.session.workspace import Workspace
from kvws.step import StepRequest, finish_step, run_step

QUERY_TOKENS = 64
SAMPLING = {"temperature": 0.0, "ignore_eos": True}


@dataclass
class RecallCost:
    """Milliseconds to the first token at one view size, one entry a repetition.

    Attributes:
        view_tokens: size of the execution view.
        text: view and query prefilled as text, nothing cached.
        recall: probe, score, plan, commit and the answer behind a newly selected view.
        unchanged: the same when the selection leaves the view as it is.
        alone: the query without any view, the floor of any pass.
        reports: of the recall steps.
    """

    view_tokens: int
    text: list[float] = field(default_factory=list[float])
    recall: list[float] = field(default_factory=list[float])
    unchanged: list[float] = field(default_factory=list[float])
    alone: list[float] = field(default_factory=list[float])
    reports: list[StepReport] = field(default_factory=list[StepReport])

    def ratio(self, cheaper: Sequence[float]) -> float:
        """Median text time over the median of another."""
        return statistics.median(self.text) / statistics.median(cheaper)


async def measure_recall(
    engine: SglangEngine,
    view_tokens: int,
    reserve_tokens: int,
    repetitions: int,
    recipe: Recipe,
    progress: Callable[[str], None],
    *,
    seed: int = 0,
) -> RecallCost:
    """Measure one view size on random tokens.

    Two workspaces: one a quarter larger than the view, where every step selects anew, and one
    that outgrew its view by less than the room beside it, where a selection changes nothing.
    """
    rng = random.Random(seed)  # noqa: S311 (not for secrets)
    tight = _limits(view_tokens, 4 * QUERY_TOKENS)
    roomy = _limits(view_tokens, reserve_tokens)
    cost = RecallCost(view_tokens)

    progress(f"view {view_tokens}: filling two workspaces")
    large = _Session("bench-large", engine, tight, recipe, rng)
    await large.grow(view_tokens + max(view_tokens // 4, 8 * BLOCK_TOKENS))
    await large.step()  # leaves the sliding view of the filling behind
    exact = _Session("bench-exact", engine, roomy, recipe, rng)
    await exact.grow(view_tokens)

    for repetition in range(repetitions):
        progress(f"view {view_tokens}: repetition {repetition + 1} of {repetitions}")
        recalled = await large.step()
        while recalled.unchanged:  # the room beside the view absorbed it; select again
            recalled = await large.step()
        cost.recall.append(recalled.ms.first_token)
        cost.reports.append(recalled)
        kept = await exact.step()
        while not kept.recalled:
            kept = await exact.step()
        if not kept.unchanged:
            raise RuntimeError("a view that holds the whole session was changed")
        cost.unchanged.append(kept.ms.first_token)
        view = large.view()
        query = large.random_tokens(QUERY_TOKENS)
        cost.alone.append(await cold_text_ms(engine, query))
        cost.text.append(await cold_text_ms(engine, [*view, *query]))
    for session in (large, exact):
        await engine.drop_workspace(session.workspace.name)
    return cost


def _limits(view_tokens: int, reserve_tokens: int) -> Limits:
    return Limits(view_tokens, reserve_tokens, BLOCK_TOKENS, view_tokens // 4, QUERY_TOKENS)


def recall_table(costs: Sequence[RecallCost]) -> Table:
    """One row a view size."""
    table = Table(box=None, header_style="bold")
    for name in (
        "view", "text, cold", "recall", "unchanged", "query alone", "text / recall",
        "text / unchanged",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for cost in costs:
        table.add_row(
            str(cost.view_tokens),
            *(
                f"{statistics.median(ms):,.0f} ms"
                for ms in (cost.text, cost.recall, cost.unchanged, cost.alone)
            ),
            f"{cost.ratio(cost.recall):.1f}x",
            f"{cost.ratio(cost.unchanged):.1f}x",
        )
    return table


class _Session:
    """A session of random tokens that grows by one query a step."""

    def __init__(
        self,
        name: str,
        engine: SglangEngine,
        limits: Limits,
        recipe: Recipe,
        rng: random.Random,
    ) -> None:
        self.workspace = Workspace(name)
        self.workspace.selector = Selector(recipe)
        self._engine = engine
        self._limits = limits
        self._rng = rng
        self._tokens: list[int] = []

    def random_tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(1000, 40000) for _ in range(count)]

    def view(self) -> list[int]:
        """Tokens of a full-budget view of this session."""
        thread = self.workspace.thread("main")
        return self.workspace.tokens_of(thread.view[: self._limits.budget_blocks])

    async def grow(self, tokens: int) -> None:
        """Append tokens without measuring."""
        await self._run(tokens)

    async def step(self) -> StepReport:
        """Ask one query."""
        return await self._run(QUERY_TOKENS)

    async def _run(self, tokens: int) -> StepReport:
        self._tokens += self.random_tokens(tokens)
        request = StepRequest("main", self._tokens, 1, keep_generated=False, sampling=SAMPLING)
        return await finish_step(run_step(request, self.workspace, self._engine, self._limits))
