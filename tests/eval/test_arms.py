"""Arms: contexts of equal length, chosen in different ways."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvws.blocks.key import BLOCK_TOKENS
from kvws.errors import ConfigError
from kvws.eval.arms import (
    FULL,
    ORACLE,
    RANDOM,
    SINGLE_SIGNALS,
    SINK_BLOCKS,
    SINK_WINDOW,
    SLIDING,
    SUMMARY,
    TEXT,
    Inquiry,
    arms_at,
    blocks_of_budget,
    competing_blocks,
    rankings,
    recent_blocks_of,
    recipes_of,
    view_by,
)
from kvws.recall.recipe import AUTO, SignalName
from tests.eval.unigrams import VOCABULARY, Unigrams, WordHistory

RECIPES = recipes_of(["lexical,mean-k"], with_profile=True)


def inquiry(blocks: int, summary_tokens: int = 0, seed: int = 0) -> Inquiry:
    chance = random.Random(seed)
    tokens = [chance.randrange(VOCABULARY) for _ in range(blocks * BLOCK_TOKENS)]
    history = WordHistory(tokens, Unigrams().read(tokens).key_values)
    mass = np.array([chance.random() for _ in range(blocks)])
    question = tokens[3 * BLOCK_TOKENS : 3 * BLOCK_TOKENS + 9]
    return Inquiry(history, question, torch.zeros(1, 9, 1, 1), mass, (5,) * summary_tokens)


@given(
    blocks=st.integers(32, 200),
    percent=st.integers(1, 99),
    summary_tokens=st.integers(0, 7000),
)
def test_every_arm_but_the_full_context_has_the_same_budget(
    blocks: int, percent: int, summary_tokens: int
) -> None:
    budget = blocks_of_budget(blocks, percent)
    arms = arms_at(inquiry(blocks, summary_tokens), budget, RECIPES, 0)
    assert (SUMMARY in arms) == (summary_tokens > 0)
    for name, arm in arms.items():
        for context in arm.contexts:
            expected = blocks if name == FULL else budget
            assert context.tokens == expected * BLOCK_TOKENS, name
            assert list(context.blocks) == sorted(set(context.blocks))


def test_a_view_is_sink_newest_quarter_and_what_was_chosen() -> None:
    arms = arms_at(inquiry(100), 24, RECIPES, 0)
    newest = tuple(range(100 - recent_blocks_of(24), 100))
    for name in (RANDOM, ORACLE, *RECIPES):
        for context in arms[name].contexts:
            assert context.blocks[0] == 0
            assert context.blocks[-len(newest) :] == newest
    assert arms[SLIDING].contexts[0].blocks == tuple(range(76, 100))
    assert arms[SINK_WINDOW].contexts[0].blocks == (0, *range(77, 100))
    assert 3 in arms[SignalName.LEXICAL].contexts[0].blocks


def test_the_oracle_takes_the_blocks_of_most_mass() -> None:
    asked = inquiry(100)
    (context,) = arms_at(asked, 24, RECIPES, 0)[ORACLE].contexts
    chosen = set(context.blocks) - {0, *range(94, 100)}
    left = set(range(1, 94)) - chosen
    assert min(asked.mass[list(chosen)]) > max(asked.mass[list(left)])


def test_random_is_drawn_twice_and_by_seed() -> None:
    first, again, other = (arms_at(inquiry(100), 24, {}, seed)[RANDOM] for seed in (1, 1, 2))
    assert first == again and first != other
    assert len(set(first.contexts)) == 2


def test_text_is_the_lexical_view_as_text() -> None:
    asked = inquiry(60)
    arms = arms_at(asked, 12, RECIPES, 0)
    blocks = arms[SignalName.LEXICAL].contexts[0].blocks
    said = [t for b in blocks for t in asked.history.tokens[b * BLOCK_TOKENS :][:BLOCK_TOKENS]]
    assert arms[TEXT].contexts[0].text == tuple(said)


def test_a_long_summary_leaves_a_quarter_to_the_newest_tokens() -> None:
    asked = inquiry(100, summary_tokens=5000)
    text = arms_at(asked, 24, {}, 0)[SUMMARY].contexts[0].text
    assert text[: 18 * BLOCK_TOKENS] == (5,) * (18 * BLOCK_TOKENS)
    assert text[18 * BLOCK_TOKENS :] == asked.history.tokens[-6 * BLOCK_TOKENS :]


def test_a_short_summary_leaves_the_rest_to_the_newest_tokens() -> None:
    asked = inquiry(100, summary_tokens=10)
    text = arms_at(asked, 24, {}, 0)[SUMMARY].contexts[0].text
    assert text == (*(5,) * 10, *asked.history.tokens[-(24 * BLOCK_TOKENS - 10) :])


def test_every_signal_alone_the_default_and_further_ones_make_an_arm() -> None:
    assert list(RECIPES) == [*SINGLE_SIGNALS, AUTO, "lexical,mean-k"]
    assert set(RECIPES["lexical,mean-k"].weights) == {SignalName.LEXICAL, SignalName.MEAN_K}


def test_without_a_profile_there_is_no_content() -> None:
    recipes = recipes_of([], with_profile=False)
    assert SignalName.CONTENT not in recipes and AUTO in recipes
    for recipe in recipes.values():
        for weights in (recipe.weights, recipe.anchor_weights):
            assert SignalName.CONTENT not in weights
    assert recipes[AUTO].anchor_weights


@pytest.mark.parametrize("signals", ["content", "content,lexical"])
def test_content_cannot_be_asked_for_without_a_profile(signals: str) -> None:
    with pytest.raises(ConfigError, match="needs a profile"):
        recipes_of([signals], with_profile=False)


def test_a_ranking_is_of_the_blocks_that_compete() -> None:
    asked = inquiry(100)
    competing = set(competing_blocks(asked.history))
    assert competing == set(range(SINK_BLOCKS, 96))
    found = rankings(asked, RECIPES, 32)
    assert set(found) == {ORACLE, SINK_WINDOW, *RECIPES}
    for order in found.values():
        assert len(order) == len(set(order)) == 32 and competing.issuperset(order)
    assert found[SINK_WINDOW] == list(range(95, 63, -1))


def test_one_recipes_view_is_that_of_its_arm() -> None:
    asked = inquiry(100)
    arm = arms_at(asked, 24, RECIPES, 0)[AUTO]
    assert view_by(RECIPES[AUTO], asked, 24) == arm.contexts[0].blocks
