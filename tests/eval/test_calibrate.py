"""Calibration: the heads that find planted facts are found, by what generalises."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from kvws.chat.render import ChatRenderer
from kvws.engine.platform_entry import declare_torchvision_ops
from kvws.errors import ModelError
from kvws.eval.calibrate import calibrate
from kvws.eval.facts import DEVELOPMENT, QuestionKind
from kvws.eval.head_choice import (
    MAX_HEADS,
    MAX_KV_HEADS,
    Figures,
    Head,
    Probe,
    choose_heads,
    figures,
)
from kvws.eval.probing import head_scores, mark_tokens, probe_history, question_tokens
from kvws.eval.reader import KeyValues, Reading
from kvws.recall.profile import Profile

LAYERS, QUERY_HEADS, KV_HEADS, BLOCKS = 6, 8, 4, 40


def made_probes(
    good: dict[Head, float], *, histories: int = 3, templates: int = 6, seed: int = 0
) -> list[Probe]:
    """Heads score at random, but some raise the right block, by so many deviations."""
    random = torch.Generator().manual_seed(seed)
    kinds: tuple[QuestionKind, ...] = ("verbatim", "paraphrased", "paraphrased")
    probes: list[Probe] = []
    for history in range(histories):
        for template in range(templates):
            for kind in kinds:
                scores = torch.randn(LAYERS, QUERY_HEADS, BLOCKS, generator=random)
                right = int(torch.randint(BLOCKS, (1,), generator=random))
                for head, raise_ in good.items():
                    scores[head][right] += raise_
                probes.append(Probe(history, f"form {template}", kind, (right,), scores))
    return probes


def kv_heads_of(heads: Sequence[Head]) -> set[Head]:
    return {(layer, head // (QUERY_HEADS // KV_HEADS)) for layer, head in heads}


def test_the_heads_that_find_facts_are_chosen_and_others_left() -> None:
    good = {(2, 4): 3.0, (2, 5): 3.0, (4, 0): 3.0}
    choice = choose_heads(made_probes(good), KV_HEADS)
    assert set(choice.heads) >= set(good)
    assert choice.validated > 0.9


def test_a_choice_keeps_its_limits() -> None:
    good = {(layer, head): 2.0 for layer in range(LAYERS) for head in range(0, QUERY_HEADS, 2)}
    heads = choose_heads(made_probes(good), KV_HEADS).heads
    assert len(heads) <= MAX_HEADS and len(kv_heads_of(heads)) <= MAX_KV_HEADS
    assert len(set(heads)) == len(heads)


def test_a_further_kv_head_must_be_worth_its_memory() -> None:
    perfect_and_useless = {(3, 2): 50.0, (1, 0): 0.1, (5, 6): 0.1}
    heads = choose_heads(made_probes(perfect_and_useless), KV_HEADS).heads
    assert heads[0] == (3, 2) and len(kv_heads_of(heads)) == 1


def test_a_head_that_cannot_tell_blocks_apart_finds_nothing() -> None:
    blind = [
        Probe(p.history, p.template, p.kind, p.right, torch.where(p.scores > 9, p.scores, 0.0))
        for p in made_probes({(1, 1): 50.0})
    ]
    assert choose_heads(blind, KV_HEADS).heads[0] == (1, 1)
    assert figures(blind, [(0, 0)]) == Figures(0.0, 0.0, 0.0, pytest.approx(1 / BLOCKS))


def test_every_form_of_fact_counts_the_same_however_often_it_is_asked_for() -> None:
    probes = made_probes({(0, 0): 50.0}, templates=4)
    for probe in probes:  # one form has an expert of its own, and is asked for all the time
        if probe.template == "form 0":
            probe.scores[0, 0] = 0.0
            probe.scores[5, 7][list(probe.right)] = 99.0
    often = [probe for probe in probes if probe.template == "form 0"] * 9
    assert choose_heads(probes + often, KV_HEADS).heads[0] == (0, 0)


def test_figures_are_of_the_ranks() -> None:
    scores = torch.zeros(1, 1, 10)
    scores[0, 0] = torch.arange(10, 0, -1)
    probes = [Probe(0, "form", "verbatim", right, scores) for right in ((0,), (2, 9), (5,), (9,))]
    expected = (1 + 1 / 3 + 1 / 6 + 1 / 10) / 4
    assert figures(probes, [(0, 0)]) == Figures(0.25, 0.5, 0.75, pytest.approx(expected))
    assert figures(probes) == figures(probes, [(0, 0)])


@pytest.mark.parametrize(("histories", "templates"), [(1, 6), (3, 1)])
def test_a_choice_that_cannot_be_validated_is_refused(histories: int, templates: int) -> None:
    with pytest.raises(ValueError, match="validated"):
        choose_heads(made_probes({}, histories=histories, templates=templates), KV_HEADS)


def test_scores_are_the_best_token_standardised_over_blocks() -> None:
    random = torch.Generator().manual_seed(0)
    queries = torch.randn(2, 5, 4, 8, generator=random)
    keys = torch.randn(2, 2, 3 * 32, 8, generator=random)
    scores = head_scores(queries, keys)
    for layer in range(2):
        for head in range(4):
            best = [-float("inf")] * 3
            for query in queries[layer, :, head]:
                logits = [
                    max(float(query @ key) for key in keys[layer, head // 2, b : b + 32])
                    for b in (0, 32, 64)
                ]
                mean = sum(logits) / 3
                deviation = (sum((x - mean) ** 2 for x in logits) / 3) ** 0.5
                best = [max(x, (y - mean) / deviation) for x, y in zip(best, logits, strict=True)]
            torch.testing.assert_close(scores[layer, head], torch.tensor(best))


@pytest.fixture(scope="module")
def renderer(smollm2: Path) -> ChatRenderer:
    declare_torchvision_ops()
    return ChatRenderer(smollm2)


def test_only_the_questions_own_tokens_ask(renderer: ChatRenderer) -> None:
    question = "Which secret opens the door to billing?"
    tokens, own = question_tokens(renderer, question)
    assert renderer.decode([tokens[place] for place in own]) == question
    assert renderer.decode(tokens) == (
        f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_marks_are_what_opens_and_closes_messages(renderer: ChatRenderer) -> None:
    marks = sorted(renderer.decode([token]) for token in mark_tokens(renderer))
    assert marks == ["<|im_end|>", "<|im_start|>"]


class PlantedHeads:
    """Stands in for a model: its heads attend at random, but chosen ones to equal tokens."""

    layers, query_heads, kv_heads, head_dim = 4, 4, 2, 64

    def __init__(self, planted: Sequence[Head] = (), window_tokens: int = 8192) -> None:
        self.window_tokens = window_tokens
        self._planted = planted
        random = torch.Generator().manual_seed(1)
        self._words = torch.randn(1 << 16, self.head_dim, generator=random)
        self._noise = torch.Generator().manual_seed(2)

    def read(
        self,
        tokens: Sequence[int],
        before: KeyValues | None = None,
        *,
        with_queries: bool = False,
    ) -> Reading:
        shape = (self.layers, len(tokens), self.query_heads, self.head_dim)
        queries = torch.randn(shape, generator=self._noise)
        keys = torch.randn(
            self.layers, self.kv_heads, len(tokens), self.head_dim, generator=self._noise
        )
        words = self._words[list(tokens)]
        for layer, head in self._planted:
            queries[layer, :, head] = words
            keys[layer, head * self.kv_heads // self.query_heads] = words
        nothing = torch.zeros(0)
        return Reading(KeyValues(keys, nothing), queries if with_queries else None, nothing, None)


def test_planted_heads_are_found_and_make_a_profile(renderer: ChatRenderer) -> None:
    planted = [(1, 0), (2, 3)]
    seen: list[tuple[int, int]] = []
    found = calibrate(
        PlantedHeads(planted),
        renderer,
        "the model",
        histories=3,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert found.profile.content_heads[0] in planted
    assert set(planted) <= set(found.profile.content_heads)
    assert found.profile.model == "the model" and found.profile.rotated_layers == (0, 3)
    assert Profile.from_json(found.profile.to_json()) == found.profile
    assert set(found.alone) == set(found.profile.content_heads)
    verbatim, paraphrased = found.development
    assert (verbatim.kind, paraphrased.kind) == ("verbatim", "paraphrased")
    assert verbatim.chosen.recall_8 > 0.8  # by words: the planted heads know nothing else
    assert verbatim.chosen.reciprocal_rank > paraphrased.chosen.reciprocal_rank
    assert seen[0][0] == 0 and seen[-1][0] == seen[-1][1] == len(seen) - 1


def test_a_history_is_asked_for_every_form_and_wording(renderer: ChatRenderer) -> None:
    probes = list(probe_history(PlantedHeads(), renderer, DEVELOPMENT, 0, 5))
    assert {probe.template for probe in probes} == {form.name for form in DEVELOPMENT.templates}
    wordings = sum(1 + len(form.paraphrases) for form in DEVELOPMENT.templates)
    assert len(probes) == wordings
    assert all(probe.history == 5 for probe in probes)
    assert all(0 <= place < probe.scores.shape[2] for probe in probes for place in probe.right)


def test_a_short_context_is_refused(renderer: ChatRenderer) -> None:
    probes: Iterator[Probe] = probe_history(
        PlantedHeads(window_tokens=1024), renderer, DEVELOPMENT, 0, 0
    )
    with pytest.raises(ModelError, match="too short to calibrate"):
        next(probes)
