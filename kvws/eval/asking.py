"""Asks for planted facts behind views of the history that they stand in.

An answer is right when the model, given the cue, would go on with the value, token by token. The
history is read once; what blocks are chosen by is probed behind a small window of it, as a step
is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from kvws.blocks.key import BLOCK_TOKENS
from kvws.chat.render import ChatRenderer
from kvws.chat.spelling import spelling_of
from kvws.eval.arms import FULL, SINK_BLOCKS, blocks_of_budget
from kvws.eval.facts import Question, QuestionKind
from kvws.eval.history import History
from kvws.eval.needles import Haystack, Needle, questions_of
from kvws.eval.probing import question_tokens
from kvws.eval.reader import KeyValues, Reader
from kvws.eval.views import assembled, ranked_at, regions_of, views_of
from kvws.recall.profile import Profile
from kvws.recall.recipe import AUTO, Recipe
from kvws.session.ingest import window

RIGHT = "right block given"


@dataclass(frozen=True)
class Verdict:
    """What the model makes of a question behind one view.

    Attributes:
        exact: the answer is right.
        nll: of the right value: mean over its tokens, in nats.
        picked: the right value is likelier than what other facts of its form say, and than the
            older one: a choice that models can make who would say it in other words.
        said_older: the older value is likelier than the right one; None where there is none.
    """

    exact: bool
    nll: float
    picked: bool
    said_older: bool | None


@dataclass(frozen=True)
class Answered:
    """One question behind one view.

    Attributes:
        trace, episode: of the history.
        needle: its number.
        template: form of the fact.
        kind: verbatim or paraphrased.
        is_update: an older value stands further up.
        budget_percent: size of the view, of the history.
        arm: how it was chosen.
        verdict: of the model.
        full_exact: the answer is right with the full context.
        is_ranked: the arm puts blocks in an order.
        rank: place of the fact's best block in it, from 0; None if it was not chosen.
        blocks: that hold the fact.
        blocks_in_view: of those.
    """

    trace: str
    episode: int
    needle: int
    template: str
    kind: QuestionKind
    is_update: bool
    budget_percent: int
    arm: str
    verdict: Verdict
    full_exact: bool
    is_ranked: bool
    rank: int | None
    blocks: int
    blocks_in_view: int


class Asking:
    """A history with needles, read once."""

    def __init__(
        self,
        reader: Reader,
        renderer: ChatRenderer,
        profile: Profile | None,
        haystack: Haystack,
        probe_tokens: int = 512,
        *,
        as_orders: bool = False,
    ) -> None:
        """Reads the history.

        Args:
            probe_tokens: of the window that a question is probed behind; 0 for the history.
            as_orders: questions are put as orders.
        """
        self._as_orders = as_orders
        self._reader, self._renderer, self._episode = reader, renderer, haystack.episode
        self._probe_blocks = probe_tokens // BLOCK_TOKENS
        whole = len(haystack.tokens) // BLOCK_TOKENS * BLOCK_TOKENS
        tokens = haystack.tokens[:whole]
        self._tail = haystack.tokens[whole:]
        read = reader.read(tokens).key_values
        self._history = History(reader, tokens, read, spelling_of(renderer), profile)

    def answers(
        self, needle: Needle, recipes: Mapping[str, Recipe], budgets: Sequence[int], seed: str
    ) -> Iterator[Answered]:
        """Ask for a needle in its own words and in others, behind every arm's view."""
        for question in questions_of(needle):
            question = question.as_order() if self._as_orders else question
            asked = [*self._tail, *question_tokens(self._renderer, question.text)[0]]
            jury = _Jury(self._reader, self._renderer, self._history, asked, question, needle)
            queries = self._probe(asked)
            for percent in budgets:
                chance = f"{seed} {needle.number} {question.text} {percent}"
                yield from self._behind_views(
                    needle, question, asked, queries, recipes, percent, jury, chance
                )

    def _behind_views(
        self,
        needle: Needle,
        question: Question,
        asked: Sequence[int],
        queries: torch.Tensor,
        recipes: Mapping[str, Recipe],
        percent: int,
        jury: _Jury,
        chance: str,
    ) -> Iterator[Answered]:
        history, right = self._history, frozenset(needle.planted.blocks)
        budget_blocks = blocks_of_budget(history.blocks, percent)
        regions = regions_of(history, budget_blocks)
        scores = history.scores(queries, asked, history.candidates(regions))

        full = tuple(range(history.blocks))
        views: dict[str, tuple[int, ...]] = {FULL: full}
        rankings: dict[str, tuple[int, ...]] = {}
        chosen = views_of(history, asked, scores, regions, budget_blocks, recipes, chance)
        for arm, view in chosen:
            views[arm], rankings[arm] = view.blocks, view.ranking
        given = [*sorted(right), *(b for b in rankings[AUTO] if b not in right)]
        views[RIGHT] = assembled(regions, given, budget_blocks)

        for arm, blocks in views.items():
            ranking = rankings.get(arm)
            yield Answered(
                trace=self._episode.trace,
                episode=self._episode.number,
                needle=needle.number,
                template=needle.planted.fact.template.name,
                kind=question.kind,
                is_update=needle.older is not None,
                budget_percent=percent,
                arm=arm,
                verdict=jury.of(blocks),
                full_exact=jury.of(full).exact,
                is_ranked=ranking is not None,
                rank=ranked_at(ranking or (), right),
                blocks=len(right),
                blocks_in_view=len(right.intersection(blocks)),
            )

    def _probe(self, asked: Sequence[int]) -> torch.Tensor:
        """Raw Q of a question, [layers, tokens, query_heads, head_dim]."""
        everything = tuple(range(self._history.blocks))
        probed = everything
        if self._probe_blocks:
            size = max(SINK_BLOCKS + 1, self._probe_blocks)
            probed = window(everything, SINK_BLOCKS, min(size, len(everything)))
        before = self._history.key_values_of(probed)
        queries = self._reader.read(asked, before, with_queries=True).queries
        assert queries is not None  # asked for
        return queries


class _Jury:
    """Verdicts on one question; equal views get the same one."""

    def __init__(
        self,
        reader: Reader,
        renderer: ChatRenderer,
        history: History,
        asked: Sequence[int],
        question: Question,
        needle: Needle,
    ) -> None:
        self._reader, self._history = reader, history
        self._begun = [*asked, *renderer.pieces(question.cue)]
        self._value = renderer.pieces(" " + question.value)
        older = needle.older
        self._older = renderer.pieces(" " + older.fact.value) if older else None
        self._rivals = [renderer.pieces(" " + value) for value in needle.rivals]
        self._seen: dict[tuple[int, ...], Verdict] = {}

    def of(self, view: tuple[int, ...]) -> Verdict:
        if view not in self._seen:
            before = self._history.key_values_of(view)
            begun = self._reader.read(self._begun, before)
            before, last = before.and_then(begun.key_values), begun.hidden[-1:]
            exact, nll = self._likelihood(before, last, self._value)
            picked = all(nll < self._likelihood(before, last, v)[1] for v in self._rivals)
            said_older = None
            if self._older is not None:
                said_older = self._likelihood(before, last, self._older)[1] < nll
            self._seen[view] = Verdict(exact, nll, picked and not said_older, said_older)
        return self._seen[view]

    def _likelihood(
        self, before: KeyValues, last: torch.Tensor, value: Sequence[int]
    ) -> tuple[bool, float]:
        """Whether greedy decoding would say a value, and its mean NLL.

        Args:
            last: [1, hidden] state that the value's first token is read from.
        """
        hidden = [last]
        if len(value) > 1:
            hidden.append(self._reader.read(value[:-1], before).hidden)
        said = self._reader.log_probabilities(torch.cat(hidden))
        wanted = torch.tensor(list(value))
        exact = torch.equal(torch.argmax(said, dim=1), wanted)
        return exact, -float(said.gather(1, wanted.unsqueeze(1)).mean())
