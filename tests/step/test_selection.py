"""Steps whose view is chosen by several signals: by what blocks say as well as by their keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvws.recall.plan import Action, Decision
from kvws.recall.recipe import FUSED, Recipe, SignalName, recipe_named
from kvws.recall.regions import Reason
from kvws.recall.selector import Selector
from kvws.recall.text.spelling import Spelling
from tests.step.session import LIMITS, Reply, Session, in_loop

LEXICAL, ROTATED_MEAN = SignalName.LEXICAL, SignalName.ROTATED_MEAN
RECIPE = FUSED.without([SignalName.CONTENT])
TO_OBSERVATIONS = replace(RECIPE, told_words=8)
"""The same, for which what is asked here is nothing short but an observation."""

ASKED = 3
"""The topic of the question. The block that has its rare words is one of eight about another."""

RARE_WORDS = [8000 * 3 + number for number in range(8)]


def said(tokens: Sequence[int]) -> str:
    """As a person says it."""
    return "".join(f" w{token}" for token in tokens)


def shown(tokens: Sequence[int]) -> str:
    """As a tool shows it."""
    return "".join(f" w{token}$" for token in tokens)


class Talk:
    """32 blocks about four topics; one of the first topic ends with the rare words."""

    def __init__(self, recipe: Recipe, spelled: Callable[[Sequence[int]], str] = shown) -> None:
        self.session = Session.start(signals=("rotated-mean",))
        self.session.workspace.selector = Selector(recipe, Spelling(spelled))
        text = self.session.text
        self.prompt = text(0, 6)[: -len(RARE_WORDS)] + RARE_WORDS
        self.rare_block = 5
        self.prompt += text(0, 2) + text(ASKED, 8) + text(1, 8) + text(2, 8)

    async def asks(self) -> Reply:
        await self.session.ask_and_check([*self.prompt, *self.session.text(2, 0.5)])
        question = self.session.text(ASKED, 0.75) + RARE_WORDS
        return await self.session.ask_and_check([*self.prompt, *question])


def in_view(reply: Reply) -> dict[int, Decision]:
    return {d.block: d for d in reply.report.decisions if d.action is not Action.DROP}


@in_loop
async def test_a_block_with_rare_words_of_a_short_result_comes_with_its_neighbours() -> None:
    talk = Talk(RECIPE)
    reply = await talk.asks()
    assert talk.session.workspace.block_tokens(talk.rare_block)[-8:] == tuple(RARE_WORDS)
    view = in_view(reply)
    assert (view[talk.rare_block].reason, view[talk.rare_block].signal) == (Reason.ANCHOR, LEXICAL)
    assert view[talk.rare_block].ranks[LEXICAL] == 0
    for beside in (talk.rare_block - 1, talk.rare_block + 1):
        assert (view[beside].reason, view[beside].signal) == (Reason.NEIGHBOUR, None)
    assert reply.report.view_blocks == LIMITS.budget_blocks


@in_loop
async def test_of_what_a_person_asks_it_comes_with_the_neighbour_that_they_are_next_to() -> None:
    talk = Talk(RECIPE, said)
    view = in_view(await talk.asks())
    assert (view[talk.rare_block].reason, view[talk.rare_block].signal) == (Reason.ANCHOR, LEXICAL)
    assert view[talk.rare_block + 1].reason is Reason.NEIGHBOUR
    before = view.get(talk.rare_block - 1)
    assert before is None or before.reason is not Reason.NEIGHBOUR


@in_loop
async def test_a_block_with_rare_words_of_an_observation_is_one_of_the_fused_order() -> None:
    talk = Talk(TO_OBSERVATIONS)
    reply = await talk.asks()
    decision = in_view(reply)[talk.rare_block]
    assert (decision.reason, decision.signal) == (Reason.SCORE, LEXICAL)
    assert decision.ranks[LEXICAL] == 0 and decision.ranks[ROTATED_MEAN] > 4
    assert decision.score is not None and decision.score > 0
    assert reply.report.view_blocks == LIMITS.budget_blocks
    reasons = {d.reason for d in in_view(reply).values()}
    assert not {Reason.ANCHOR, Reason.NEIGHBOUR} & reasons


@in_loop
async def test_by_its_keys_alone_it_is_not_recalled() -> None:
    talk = Talk(recipe_named("rotated-mean"))
    assert talk.rare_block not in in_view(await talk.asks())


@in_loop
async def test_the_report_names_the_signals_that_spoke() -> None:
    fused = await Talk(RECIPE).asks()
    assert fused.report.signals == ("rotated-mean", "lexical", "recency")
    alone = await Talk(recipe_named("rotated-mean")).asks()
    assert alone.report.signals == ("rotated-mean",)
    fitting = await Session.start().ask([1, 2, 3])
    assert fitting.report.signals == () and not fitting.report.recalled


@in_loop
async def test_blocks_of_an_observation_s_topic_are_recalled_for_their_keys() -> None:
    talk = Talk(TO_OBSERVATIONS)
    decisions = in_view(await talk.asks()).values()
    of_topic = [d for d in decisions if d.block in range(8, 16)]
    assert ROTATED_MEAN in {d.signal for d in of_topic}
