"""Calibration: makes a model's retrieval profile, from facts planted in synthetic histories."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvws.chat.render import ChatRenderer
from kvws.eval.facts import CALIBRATION, DEVELOPMENT, QuestionKind
from kvws.eval.head_choice import (
    Choice,
    Figures,
    Head,
    Probe,
    choose_heads,
    figures,
    single_reciprocal_ranks,
)
from kvws.eval.probing import Reads, probe_history
from kvws.recall.profile import ContentKeys, Profile
from kvws.recall.signals.rotated_mean import default_rotated_layers

_CONTENT_KEYS: ContentKeys = "int8"
_DEVELOPMENT_HISTORIES = 3
Progress = Callable[[int, int], None]
"""Called with the facts asked about and their number."""


@dataclass(frozen=True)
class KindFigures:
    """How well questions of one kind found their blocks.

    Attributes:
        kind: verbatim or paraphrased.
        chosen: by the heads chosen.
        every_head: by all heads of the model together.
    """

    kind: QuestionKind
    chosen: Figures
    every_head: Figures


@dataclass(frozen=True)
class Calibration:
    """A profile, and what speaks for it.

    Attributes:
        profile: to be kept.
        choice: of its content heads.
        alone: per content head the mean reciprocal rank that it alone reached in calibration.
        development: on facts and forms that the choice had no part in.
    """

    profile: Profile
    choice: Choice
    alone: dict[Head, float]
    development: tuple[KindFigures, ...]


def calibrate(
    reader: Reads,
    renderer: ChatRenderer,
    model: str,
    *,
    histories: int = 6,
    seed: int = 0,
    progress: Progress = lambda done, total: None,
) -> Calibration:
    """Ask the model about planted facts, and keep the heads that found them.

    Takes the time of reading about 2.5K tokens per history, and as long again for the questions.

    Args:
        model: its identity.
        histories: to choose by, two or more; a few others are read to report on.

    Raises:
        ModelError: the model's context is too short.
    """
    sets = [(CALIBRATION, number) for number in range(histories)]
    sets += [(DEVELOPMENT, number) for number in range(_DEVELOPMENT_HISTORIES)]
    total = sum(len(facts.templates) for facts, _ in sets)
    probes: dict[str, list[Probe]] = {CALIBRATION.name: [], DEVELOPMENT.name: []}
    done = 0
    progress(done, total)
    for facts, history in sets:
        for probe in probe_history(reader, renderer, facts, seed, history):
            probes[facts.name].append(probe)
            if probe.kind == "verbatim":
                done += 1
                progress(done, total)
    calibration, development = probes[CALIBRATION.name], probes[DEVELOPMENT.name]
    choice = choose_heads(calibration, reader.kv_heads)
    alone = single_reciprocal_ranks(calibration)
    return Calibration(
        _profile(reader, model, choice.heads),
        choice,
        {head: float(alone[head]) for head in choice.heads},
        tuple(_figures(development, kind, choice.heads) for kind in ("verbatim", "paraphrased")),
    )


def _profile(reader: Reads, model: str, heads: tuple[Head, ...]) -> Profile:
    return Profile(
        model=model,
        layers=reader.layers,
        query_heads=reader.query_heads,
        kv_heads=reader.kv_heads,
        head_dim=reader.head_dim,
        content_heads=heads,
        rotated_layers=default_rotated_layers(reader.layers),
        content_keys=_CONTENT_KEYS,
    )


def _figures(probes: list[Probe], kind: QuestionKind, heads: tuple[Head, ...]) -> KindFigures:
    asked = [probe for probe in probes if probe.kind == kind]
    return KindFigures(kind, figures(asked, heads), figures(asked))
