"""Which heads find content: the decision, from how each head scored the blocks for each question.

Scores of heads are summed, so heads are chosen together. How to choose them, and how many, is
decided by questions about facts of forms that the choice has not seen: what is best on its own
questions is mostly luck.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal, TypeVar

import torch

from kvws.eval.facts import QuestionKind

MAX_HEADS = 8
MAX_KV_HEADS = 4
"""Keys of every token are kept for each: the memory that content recall costs."""

_FOLDS = 3  # of histories, and of forms of facts
_POOL_HEADS = 40
_WORTH_A_KV_HEAD = 0.005
"""Gain in mean reciprocal rank that a further KV head must bring."""

Method = Literal["single", "forward"]
METHODS: tuple[Method, ...] = ("single", "forward")
Head = tuple[int, int]
"""Layer and query head."""

T = TypeVar("T", int, str)


@dataclass(frozen=True)
class Probe:
    """One question, and what the heads made of it.

    Attributes:
        history: number of the history that it was asked in.
        template: form of the fact.
        kind: verbatim or paraphrased.
        right: columns of `scores` that hold the fact, at least one.
        scores: [layers, query_heads, blocks] float32, of blocks that can be selected.
    """

    history: int
    template: str
    kind: QuestionKind
    right: tuple[int, ...]
    scores: torch.Tensor

    @cached_property
    def alone(self) -> torch.Tensor:
        """[layers, query_heads] float32: 1 / rank that each head alone gives the right block."""
        return 1 / (1 + _ranks(self.scores, self.right).float())


@dataclass(frozen=True)
class Figures:
    """How well blocks were found: shares of questions whose block was among the first n, and the
    mean of 1 / rank."""

    recall_1: float
    recall_3: float
    recall_8: float
    reciprocal_rank: float


@dataclass(frozen=True)
class Choice:
    """Heads, and how they were found.

    Attributes:
        heads: in the order they were taken.
        method: the best heads, or those that add most to the ones before.
        validated: the method's mean reciprocal rank on forms of facts it was not shown.
    """

    heads: tuple[Head, ...]
    method: Method
    validated: float


def figures(probes: Sequence[Probe], heads: Sequence[Head] | None = None) -> Figures:
    """How well the sum of some heads' scores finds the blocks; of all heads for None.

    Raises:
        ValueError: there are no probes.
    """
    if not probes:
        raise ValueError("no questions")
    ranks = torch.stack([_ranks(_summed(probe, heads), probe.right) for probe in probes]).float()
    first, third, eighth = (float((ranks < n).float().mean()) for n in (1, 3, 8))
    return Figures(first, third, eighth, float((1 / (1 + ranks)).mean()))


def choose_heads(probes: Sequence[Probe], kv_heads: int) -> Choice:
    """The heads to keep.

    Every kind of question to every form of fact counts the same, however many there are.

    Args:
        probes: of at least two histories and two forms of facts.
        kv_heads: of the model.

    Raises:
        ValueError: there are fewer.
    """
    gqa_group = probes[0].scores.shape[1] // kv_heads
    folds = _folds(probes)
    ways: list[tuple[float, Method, int, int]] = []
    for method in METHODS:
        for kv_limit in range(1, MAX_KV_HEADS + 1):
            orders = [_ordered(method, seen, gqa_group, kv_limit) for seen, _ in folds]
            for count in range(1, MAX_HEADS + 1):
                validated = sum(
                    _reciprocal_rank(unseen, order[:count])
                    for (_, unseen), order in zip(folds, orders, strict=True)
                ) / len(folds)
                ways.append((validated, method, kv_limit, count))
    validated, method, kv_limit, count = max(
        ways, key=lambda way: (way[0] - _WORTH_A_KV_HEAD * way[2], -way[3])
    )
    heads = _ordered(method, probes, gqa_group, kv_limit)[:count]
    return Choice(tuple(heads), method, validated)


def _folds(probes: Sequence[Probe]) -> list[tuple[list[Probe], list[Probe]]]:
    """Ways to choose by some probes and validate with others, which share neither history nor
    form of fact with them.

    Raises:
        ValueError: there are too few of either.
    """
    histories = _dealt({probe.history for probe in probes})
    templates = _dealt({probe.template for probe in probes})
    folds: list[tuple[list[Probe], list[Probe]]] = []
    for history, template in product(range(_FOLDS), repeat=2):
        seen: list[Probe] = []
        unseen: list[Probe] = []
        for probe in probes:
            if (histories[probe.history] == history) != (templates[probe.template] == template):
                continue
            (unseen if histories[probe.history] == history else seen).append(probe)
        if seen and unseen:
            folds.append((seen, unseen))
    if not folds:
        raise ValueError("a choice is validated on histories and facts that it has not seen")
    return folds


def _dealt(items: Set[T]) -> dict[T, int]:
    """Items dealt out to the folds."""
    return {item: place % _FOLDS for place, item in enumerate(sorted(items))}


def _ordered(method: Method, probes: Sequence[Probe], gqa_group: int, kv_limit: int) -> list[Head]:
    """At most MAX_HEADS heads in at most `kv_limit` KV heads, the first to take first."""
    alone = single_reciprocal_ranks(probes)
    numbers = alone.flatten().argsort(descending=True, stable=True)
    best_first = [divmod(int(number), alone.shape[1]) for number in numbers]
    pool = best_first[:_POOL_HEADS] if method == "forward" else best_first
    take = _ForwardSelection(probes, pool) if method == "forward" else None
    chosen: list[Head] = []
    kept: set[tuple[int, int]] = set()
    while len(chosen) < MAX_HEADS:
        free = [
            (layer, head)
            for layer, head in pool
            if (layer, head) not in chosen
            and (len(kept) < kv_limit or (layer, head // gqa_group) in kept)
        ]
        if not free:
            break
        layer, head = take(free) if take else free[0]
        chosen.append((layer, head))
        kept.add((layer, head // gqa_group))
    return chosen


class _ForwardSelection:
    """Takes the head that adds most to those it took before.

    By the mean log probability of the right blocks, with summed scores as logits: ranks move by
    steps, and a choice by them over-fits.
    """

    def __init__(self, probes: Sequence[Probe], pool: Sequence[Head]) -> None:
        layers, numbers = (torch.tensor(part) for part in zip(*pool, strict=True))
        blocks = max(probe.scores.shape[2] for probe in probes)
        self._place = {head: place for place, head in enumerate(pool)}
        # Histories differ in length: the blocks that one lacks are neither real nor right.
        self._scores = torch.zeros(len(probes), len(pool), blocks)
        self._real = torch.zeros(len(probes), 1, blocks, dtype=torch.bool)
        self._right = torch.zeros(len(probes), 1, blocks, dtype=torch.bool)
        for number, probe in enumerate(probes):
            own = probe.scores.shape[2]
            self._scores[number, :, :own] = probe.scores[layers, numbers]
            self._real[number, :, :own] = True
            self._right[number, :, list(probe.right)] = True
        self._sums = torch.zeros(len(probes), 1, blocks)
        self._weights = _weights(probes)

    def __call__(self, free: Sequence[Head]) -> Head:
        """One of the heads that are free to take."""
        places = torch.tensor([self._place[head] for head in free])
        logits = self._sums + self._scores[:, places]  # [probes, free, blocks], 0 if not real
        real = self._real.sum(dim=2, keepdim=True)
        mean = logits.sum(dim=2, keepdim=True) / real
        squares = ((logits - mean).square() * self._real).sum(dim=2, keepdim=True)
        logits = logits / (squares / real).sqrt().clamp(min=1e-6)
        every = logits.masked_fill(~self._real, -torch.inf).logsumexp(dim=2)
        right = logits.masked_fill(~self._right, -torch.inf).logsumexp(dim=2)
        taken = free[int((self._weights @ (right - every)).argmax())]
        self._sums = self._sums + self._scores[:, self._place[taken]].unsqueeze(1)
        return taken


def single_reciprocal_ranks(probes: Sequence[Probe]) -> torch.Tensor:
    """[layers, query_heads] float32: mean reciprocal rank of each head alone."""
    alone = torch.stack([probe.alone for probe in probes])
    return torch.einsum("plh,p->lh", alone, _weights(probes))


def _reciprocal_rank(probes: Sequence[Probe], heads: Sequence[Head]) -> float:
    ranks = torch.stack([_ranks(_summed(probe, heads), probe.right) for probe in probes])
    return float((1 / (1 + ranks.float())) @ _weights(probes))


def _summed(probe: Probe, heads: Sequence[Head] | None) -> torch.Tensor:
    """[blocks]"""
    if heads is None:
        return probe.scores.sum(dim=(0, 1))
    layers, numbers = (torch.tensor(part) for part in zip(*heads, strict=True))
    return probe.scores[layers, numbers].sum(dim=0)


def _ranks(scores: torch.Tensor, right: Sequence[int]) -> torch.Tensor:
    """Of the best right block, from 0; a tie is lost. [..., blocks] in, [...] int64 out."""
    wrong = torch.ones(scores.shape[-1], dtype=torch.bool)
    wrong[list(right)] = False
    best = scores[..., list(right)].amax(dim=-1, keepdim=True)
    return (scores[..., wrong] >= best).sum(dim=-1)


def _weights(probes: Sequence[Probe]) -> torch.Tensor:
    """[probes] float32, together 1: each kind of question to each form of fact counts the same."""
    asked = Counter((probe.template, probe.kind) for probe in probes)
    weights = torch.tensor([1 / asked[probe.template, probe.kind] for probe in probes])
    return weights / weights.sum()
