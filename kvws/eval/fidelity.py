"""How much of what the full context says a view says too.

    trace ─▶ episodes ─▶ read once ─▶ point ─▶ full context: distributions, queries, attention
                                         └───▶ arms ─▶ read question and turn ─▶ compared
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvws.blocks.key import BLOCK_TOKENS
from kvws.eval.arms import (
    Arm,
    BlockHistory,
    Context,
    Inquiry,
    arms_at,
    blocks_of_budget,
    competing_blocks,
    rankings,
)
from kvws.eval.points import Cut, Episode, Point
from kvws.eval.reader import KeyValues, Reading
from kvws.recall.recipe import Recipe

MASS_DEPTHS = (8, 16, 32)

Array = npt.NDArray[Any]


class Reads(Protocol):
    """A model that reads tokens: `Reader`, or a stand-in."""

    def read(
        self,
        tokens: Sequence[int],
        before: KeyValues | None = None,
        *,
        with_queries: bool = False,
        with_mass: bool = False,
    ) -> Reading: ...

    def log_probabilities(self, hidden: torch.Tensor) -> torch.Tensor: ...


MakeHistory = Callable[[Sequence[int], KeyValues], BlockHistory]
"""Blocks of tokens, with their keys and values."""

Progress = Callable[[int, str], None]
"""Called with the points measured so far, and with what is being done."""


@dataclass(frozen=True)
class Judgement:
    """How a context changes what the model says; means over tokens, natural logarithms.

    Attributes:
        question_kl: KL(full ‖ context) on the question's own tokens; None where it has only one.
        turn_kl: the same on the recorded turn.
        top1: share of the recorded turn's tokens before which the likeliest token is the same.
        nll_delta: what the recorded turn lost in log-likelihood.
    """

    question_kl: float | None
    turn_kl: float
    top1: float
    nll_delta: float


@dataclass(frozen=True)
class Outcome:
    """What an arm is worth at one point.

    Attributes:
        judgement: its mean over the arm's contexts.
        context_tokens: in front of the question.
        computed_tokens: prefilled to ask: the question, and a context that is text.
        choose_ms: to score and choose.
        read_ms: to read question and turn behind the context, and a context that is text.
    """

    judgement: Judgement
    context_tokens: int
    computed_tokens: int
    choose_ms: float
    read_ms: float


@dataclass(frozen=True)
class PointResult:
    """Everything about one point.

    Attributes:
        outcomes: by budget in percent of the history, and by arm.
        mass: by arm, the share of the competing blocks' attention mass that the first 8, 16 and 32
            blocks of its order hold.
    """

    name: str
    trace: str
    format: str
    history_blocks: int
    question_tokens: int
    turn_tokens: int
    outcomes: Mapping[int, Mapping[str, Outcome]]
    mass: Mapping[str, Mapping[int, float]] = field(default_factory=dict[str, Mapping[int, float]])


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        budgets: in percent of the history.
        recipes: that make an arm each, by name.
    """

    budgets: tuple[int, ...]
    recipes: Mapping[str, Recipe]
    seed: int = 0


def judge(
    full: torch.Tensor, seen: torch.Tensor, tokens: Sequence[int], question_tokens: int
) -> Judgement:
    """Compare what the model says behind two contexts.

    Args:
        full, seen: [n - 1, vocabulary] log-probabilities of tokens 1 … n - 1, each given the
            context and the tokens before.
        tokens: [n] question and recorded turn.
        question_tokens: at least 1.
    """
    kl = (full.exp() * (full - seen)).sum(dim=-1)
    turn = slice(question_tokens - 1, None)
    gold = torch.tensor(list(tokens[1:])).unsqueeze(1)
    lost = (full - seen).gather(1, gold)[turn]
    same = (full.argmax(dim=-1) == seen.argmax(dim=-1))[turn]
    return Judgement(
        question_kl=float(kl[: question_tokens - 1].mean()) if question_tokens > 1 else None,
        turn_kl=float(kl[turn].mean()),
        top1=float(same.float().mean()),
        nll_delta=float(lost.mean()),
    )


def measure(
    cuts: Sequence[Cut],
    reader: Reads,
    make_history: MakeHistory,
    settings: Settings,
    progress: Progress = lambda done, what: None,
) -> list[PointResult]:
    """Measure every point, one episode after the other."""
    results: list[PointResult] = []
    for episode in (episode for cut in cuts for episode in cut.episodes):
        progress(len(results), f"reading {episode.trace}")
        longest = max(point.history for point in episode.points)
        key_values = reader.read(episode.tokens[:longest]).key_values
        for point in episode.points:
            progress(len(results), episode.name(point))
            results.append(
                _measure_point(episode, point, key_values, reader, make_history, settings)
            )
    progress(len(results), "done")
    return results


def _measure_point(
    episode: Episode,
    point: Point,
    key_values: KeyValues,
    reader: Reads,
    make_history: MakeHistory,
    settings: Settings,
) -> PointResult:
    asked = episode.tokens[point.history : point.end]
    before = key_values.before(point.history)
    full = reader.read(asked[:-1], before, with_queries=True, with_mass=True)
    assert full.queries is not None and full.mass is not None  # asked for
    inquiry = Inquiry(
        history=make_history(episode.tokens[: point.history], before),
        question=asked[: point.question_tokens],
        queries=full.queries[:, : point.question_tokens],
        mass=mass_of_blocks(full.mass),
        summary=point.summary,
    )
    said = reader.log_probabilities(full.hidden)
    judge = PointJudge(reader, inquiry.history, asked, point.question_tokens, said)
    outcomes: dict[int, dict[str, Outcome]] = {}
    for percent in settings.budgets:
        budget_blocks = blocks_of_budget(point.history // BLOCK_TOKENS, percent)
        seed = f"{settings.seed} {episode.name(point)}"
        arms = arms_at(inquiry, budget_blocks, settings.recipes, seed)
        outcomes[percent] = {name: judge.outcome(arm) for name, arm in arms.items()}
    return PointResult(
        name=episode.name(point),
        trace=episode.trace,
        format=episode.format,
        history_blocks=point.history // BLOCK_TOKENS,
        question_tokens=point.question_tokens,
        turn_tokens=point.turn_tokens,
        outcomes=outcomes,
        mass=mass_captured(inquiry, settings.recipes),
    )


def mass_of_blocks(mass: torch.Tensor) -> Array:
    """[layers, query_heads, tokens] to [blocks]: attention mass of whole blocks."""
    return mass.sum(dim=(0, 1)).view(-1, BLOCK_TOKENS).sum(dim=1).numpy()


def mass_captured(
    inquiry: Inquiry, recipes: Mapping[str, Recipe]
) -> dict[str, dict[int, float]]:
    """The share of the competing blocks' mass in the first blocks of each order."""
    competing = float(inquiry.mass[competing_blocks(inquiry.history)].sum())
    return {
        name: {
            depth: float(inquiry.mass[blocks[:depth]].sum()) / competing for depth in MASS_DEPTHS
        }
        for name, blocks in rankings(inquiry, recipes, max(MASS_DEPTHS)).items()
    }


class PointJudge:
    """Asks one question behind contexts; behind equal ones only once."""

    def __init__(
        self,
        reader: Reads,
        history: BlockHistory,
        asked: Sequence[int],
        question_tokens: int,
        full: torch.Tensor,
    ) -> None:
        """
        Args:
            asked: question and recorded turn.
            full: log-probabilities of them behind the full context, as in `judge`.
        """
        self._reader = reader
        self._history = history
        self._asked = asked
        self._question_tokens = question_tokens
        self._full = full
        self._known: dict[Context, tuple[Judgement, float]] = {}

    def outcome(self, arm: Arm) -> Outcome:
        judged = [self.judged(context) for context in arm.contexts]
        first = arm.contexts[0]
        return Outcome(
            judgement=_mean([judgement for judgement, _ in judged]),
            context_tokens=first.tokens,
            computed_tokens=len(first.text) + self._question_tokens,
            choose_ms=arm.choose_ms,
            read_ms=float(np.mean([read_ms for _, read_ms in judged])),
        )

    def judged(self, context: Context) -> tuple[Judgement, float]:
        """What it does to question and turn, and the ms that reading them behind it took."""
        if context not in self._known:
            begin = time.perf_counter()
            read = [*context.text, *self._asked[:-1]]
            before = self._history.key_values_of(context.blocks) if context.blocks else None
            hidden = self._reader.read(read, before).hidden[len(context.text) :]
            read_ms = 1e3 * (time.perf_counter() - begin)
            seen = self._reader.log_probabilities(hidden)
            judgement = judge(self._full, seen, self._asked, self._question_tokens)
            self._known[context] = judgement, read_ms
        return self._known[context]


def _mean(judgements: Sequence[Judgement]) -> Judgement:
    of_question = [j.question_kl for j in judgements if j.question_kl is not None]
    return Judgement(
        question_kl=float(np.mean(of_question)) if of_question else None,
        turn_kl=float(np.mean([j.turn_kl for j in judgements])),
        top1=float(np.mean([j.top1 for j in judgements])),
        nll_delta=float(np.mean([j.nll_delta for j in judgements])),
    )
