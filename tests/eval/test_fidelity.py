"""Fidelity: divergences are right where they are known, and the real model can be measured."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kvws.blocks.key import BLOCK_TOKENS
from kvws.chat.render import ChatRenderer
from kvws.engine.platform_entry import declare_torchvision_ops
from kvws.eval.arms import FULL, ORACLE, SINK_WINDOW, SLIDING, SUMMARY, TEXT, recipes_of
from kvws.eval.drift import BUDGET_PERCENT, measure_drift, read_by_step
from kvws.eval.fidelity import MASS_DEPTHS, PointResult, Settings, judge, mass_of_blocks, measure
from kvws.eval.history import History
from kvws.eval.points import Cut, Episode, Point, cut_trace
from kvws.eval.reader import Reader
from kvws.recall.recipe import AUTO, SignalName
from kvws.recall.text.spelling import Spelling
from kvws.replay.loaders import load_trace
from tests.eval.unigrams import VOCABULARY, Unigrams, WordHistory

TRACE = Path(__file__).resolve().parents[2] / "traces" / "step-summary.traj.json"


def log_p(*rows: Sequence[float]) -> torch.Tensor:
    return torch.tensor(rows).log()


def test_divergence_is_known_and_split_between_question_and_turn() -> None:
    full = log_p([0.5, 0.5], [0.5, 0.5], [0.9, 0.1])
    seen = log_p([0.25, 0.75], [0.5, 0.5], [0.2, 0.8])
    found = judge(full, seen, [0, 1, 1, 0], question_tokens=2)
    assert found.question_kl == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75))
    of_last = 0.9 * math.log(0.9 / 0.2) + 0.1 * math.log(0.1 / 0.8)
    assert found.turn_kl == pytest.approx(of_last / 2)
    assert found.top1 == pytest.approx(0.5)
    assert found.nll_delta == pytest.approx(math.log(0.9 / 0.2) / 2)


def test_equal_distributions_do_not_diverge() -> None:
    same = torch.randn(7, 20, generator=torch.Generator().manual_seed(0)).log_softmax(dim=1)
    found = judge(same, same, list(range(8)), question_tokens=3)
    assert (found.question_kl, found.turn_kl, found.top1, found.nll_delta) == (0, 0, 1, 0)


def test_a_question_of_one_token_has_no_divergence_of_its_own() -> None:
    full, seen = log_p([0.5, 0.5], [0.5, 0.5]), log_p([0.1, 0.9], [0.1, 0.9])
    found = judge(full, seen, [0, 1, 1], question_tokens=1)
    assert found.question_kl is None and found.turn_kl > 0


def test_mass_is_summed_over_heads_and_blocks() -> None:
    mass = torch.arange(2 * 3 * 64, dtype=torch.float32).view(2, 3, 64)
    expected = [float(mass[:, :, :32].sum()), float(mass[:, :, 32:].sum())]
    assert mass_of_blocks(mass).tolist() == expected


def episode(blocks: int = 60, *, summary: tuple[int, ...] = ()) -> Episode:
    """Its words are drawn around one that changes as it goes on."""
    chance = random.Random(7)
    places = range(40 + blocks * BLOCK_TOKENS)
    tokens = [(place // 200 + chance.randrange(12)) % VOCABULARY for place in places]
    points = [
        Point(1, (blocks - 20) * BLOCK_TOKENS, (blocks - 20) * 32 + 10, (blocks - 20) * 32 + 40),
        Point(2, blocks * BLOCK_TOKENS, blocks * 32 + 10, blocks * 32 + 40, summary),
    ]
    return Episode("made up", "test", "main", 0, tuple(tokens), tuple(points))


RECIPES = recipes_of([], with_profile=True)
SETTINGS = Settings((12, 50), RECIPES)


def measured(summary: tuple[int, ...] = ()) -> tuple[Unigrams, list[PointResult]]:
    reader = Unigrams()
    cut = Cut("made up", (episode(summary=summary),), {})
    return reader, measure([cut], reader, WordHistory, SETTINGS)


def test_an_arms_divergence_is_that_of_what_it_shows() -> None:
    _, results = measured()
    tested = episode()
    point = tested.points[1]
    asked = tested.tokens[point.history : point.end]
    budget = round(0.12 * 60)
    sliding = tested.tokens[point.history - budget * BLOCK_TOKENS : point.history]

    def next_token(seen: Sequence[int]) -> list[float]:
        counts = Counter(seen)
        return [(counts[token] + 1) / (len(seen) + VOCABULARY) for token in range(VOCABULARY)]

    divergences: list[float] = []
    for known in range(point.question_tokens, len(asked)):
        full = next_token([*tested.tokens[: point.history], *asked[:known]])
        seen = next_token([*sliding, *asked[:known]])
        divergences.append(sum(p * math.log(p / q) for p, q in zip(full, seen, strict=True)))
    found = results[1].outcomes[12][SLIDING]
    assert found.judgement.turn_kl == pytest.approx(sum(divergences) / 30, rel=1e-4)
    assert found.context_tokens == budget * BLOCK_TOKENS


def test_the_full_context_does_not_diverge_and_others_do() -> None:
    _, results = measured()
    for result in results:
        for outcomes in result.outcomes.values():
            assert outcomes[FULL].judgement.turn_kl == pytest.approx(0, abs=1e-6)
            assert outcomes[FULL].judgement.top1 == 1
            assert outcomes[SINK_WINDOW].judgement.turn_kl > 0.01


def test_text_is_computed_anew_and_says_what_the_view_says() -> None:
    _, results = measured()
    outcomes = results[0].outcomes[50]
    text, view = outcomes[TEXT], outcomes[SignalName.LEXICAL]
    assert text.computed_tokens == text.context_tokens + 10 and view.computed_tokens == 10
    assert text.judgement.turn_kl == pytest.approx(view.judgement.turn_kl, rel=1e-4)


def test_equal_contexts_are_read_once() -> None:
    reader, results = measured()
    # An episode; then per point the full context with and without its attention, and per budget
    # two windows, two draws, the oracle, the one view that all recipes choose, and its text.
    assert len(results) == 2
    assert reader.reads == 1 + 2 * (2 + 2 * 7)


def test_a_summary_is_an_arm_where_there_is_one() -> None:
    _, results = measured(summary=(1, 2, 3) * 200)
    assert [SUMMARY in result.outcomes[12] for result in results] == [False, True]


def test_mass_is_captured_from_the_best_blocks_on() -> None:
    _, results = measured()
    for result in results:
        assert set(result.mass) == {ORACLE, SINK_WINDOW, *RECIPES}
        competing = result.history_blocks - 5
        for shares in result.mass.values():  # this model attends to everything alike
            for depth in MASS_DEPTHS:
                assert shares[depth] == pytest.approx(min(1, depth / competing))


def test_drift_is_of_reading_behind_views() -> None:
    cuts = [Cut("made up", (episode(),), {}), Cut("empty", (), {})]
    (drift,) = measure_drift(cuts, Unigrams(), WordHistory, RECIPES[AUTO])
    assert drift.history_blocks == 60 and drift.budget_blocks == 60 * BUDGET_PERCENT // 100
    # A key of this model does not depend on what is before it: nothing drifts.
    assert drift.judgement.turn_kl == pytest.approx(0, abs=1e-6)


def test_a_history_read_by_step_has_all_its_tokens_in_order() -> None:
    tokens = [place % VOCABULARY for place in range(40 * BLOCK_TOKENS)]
    read = read_by_step(tokens, 8, Unigrams(), WordHistory, RECIPES[AUTO])
    assert read.keys.flatten().tolist() == tokens


def test_a_recorded_step_is_measured_with_the_real_model(smollm2: Path) -> None:
    declare_torchvision_ops()
    renderer, reader = ChatRenderer(smollm2), Reader(smollm2)
    spelling = Spelling(renderer.decode, tuple(renderer.pieces("<|im_start|>assistant\n")))
    cut = cut_trace(load_trace(TRACE), renderer, window_tokens=1700, points=1, seed=0)
    recipes = recipes_of([], with_profile=False)
    (result,) = measure(
        [cut],
        reader,
        lambda tokens, key_values: History(reader, tokens, key_values, spelling, None),
        Settings((25,), {name: recipes[name] for name in (SignalName.LEXICAL, AUTO)}),
    )
    outcomes = result.outcomes[25]
    assert abs(outcomes[FULL].judgement.turn_kl) < 1e-5
    assert outcomes[FULL].judgement.top1 == 1
    for name in (SLIDING, SINK_WINDOW, AUTO, TEXT):
        assert 0.001 < outcomes[name].judgement.turn_kl < 5
    assert outcomes[AUTO].judgement.turn_kl < outcomes[SLIDING].judgement.turn_kl
    assert 0 < result.mass[SINK_WINDOW][8] < result.mass[ORACLE][8] < 1
