"""Steps of sessions with more blocks than are looked at closely."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvws.recall.recipe import FUSED, Recipe, recipe_named
from kvws.recall.selector import Selector
from kvws.recall.text.spelling import Spelling
from tests.step.session import LIMITS, Session, in_loop
from tests.step.test_selection import RARE_WORDS, said

FEW = replace(LIMITS, scored_tokens=0)
"""Four views: the least that there may be."""


class Watched:
    """A session whose engine notes how many blocks it was asked to score."""

    def __init__(self, recipe: Recipe, *signals: str) -> None:
        self.session = Session.start(signals=signals, device_pages=256)
        self.session.limits = FEW
        self.session.workspace.selector = Selector(recipe, Spelling(said))
        self.scored: list[int] = []
        self.runs = 0
        engine: Any = self.session.engine
        score, score_runs = engine.score, engine.score_runs

        async def noted(rid: str, workspace: str, candidates: bytes, *rest: Any) -> Any:
            self.scored.append(sum(candidates))
            return await score(rid, workspace, candidates, *rest)

        async def noted_runs(*arguments: Any) -> Any:
            self.runs += 1
            return await score_runs(*arguments)

        engine.score, engine.score_runs = noted, noted_runs

    async def talks(self, blocks: int) -> list[int]:
        """A prompt whose sixth block ends with rare words."""
        text = self.session.text
        prompt = text(0, 6)[: -len(RARE_WORDS)] + RARE_WORDS
        while len(prompt) < 32 * blocks:
            prompt += text(1 + len(prompt) % 3, 8)
        await self.session.ask_and_check(prompt)
        return prompt


@in_loop
async def test_a_long_session_is_shortlisted_and_the_words_of_the_question_are_found() -> None:
    watched = Watched(FUSED, "rotated-mean", "content")
    prompt = await watched.talks(100)
    watched.scored.clear()
    question = watched.session.text(3, 0.75) + RARE_WORDS
    reply = await watched.session.ask_and_check([*prompt, *question])
    assert watched.scored == [FEW.scored_blocks] and watched.runs >= 1
    kept = {d.block for d in reply.report.decisions if d.action.value != "drop"}
    assert 5 in kept
    assert reply.report.view_blocks == LIMITS.budget_blocks


@in_loop
async def test_what_is_not_longer_than_that_is_looked_at_whole() -> None:
    watched = Watched(FUSED, "rotated-mean", "content")
    prompt = await watched.talks(24)
    reply = await watched.session.ask_and_check([*prompt, *watched.session.text(3, 0.75)])
    assert watched.runs == 0 and reply.report.recalled
    assert max(watched.scored) <= FEW.scored_blocks


@in_loop
async def test_an_engine_is_asked_for_no_more_blocks_than_it_has_room_for() -> None:
    watched = Watched(FUSED, "rotated-mean", "content")
    watched.session.limits = LIMITS
    prompt = await watched.talks(100)
    assert watched.runs == 0 and max(watched.scored) > 60
    watched.scored.clear()
    watched.session.engine.room_for_rows = 60
    await watched.session.ask_and_check([*prompt, *watched.session.text(3, 0.75)])
    assert watched.scored == [60]


@in_loop
async def test_without_content_heads_every_block_is_scored() -> None:
    watched = Watched(recipe_named("mean-k"), "mean-k")
    prompt = await watched.talks(100)
    watched.scored.clear()
    await watched.session.ask_and_check([*prompt, *watched.session.text(3, 0.75)])
    assert watched.scored and min(watched.scored) > FEW.scored_blocks


def test_a_view_is_chosen_from_at_least_four_times_as_many_blocks() -> None:
    assert FEW.scored_blocks == 4 * FEW.budget_blocks
    assert replace(LIMITS, scored_tokens=100 * 32).scored_blocks == 100
