"""`kvws eval variants`: what every choice about the default is worth."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from kvws.cli.eval_inputs import (
    Judge,
    budgets_option,
    input_options,
    judge_of,
    progress_bar,
    report_options,
    write_report,
)
from kvws.cli.eval_points import cut_sessions, model_of, point_options, sessions_of, window_of
from kvws.recall.recipe import FUSED, SignalName
from kvws.replay.report import require_writable

if TYPE_CHECKING:
    from kvws.eval.arms import BlockHistory
    from kvws.eval.reader import KeyValues
    from kvws.eval.variants import Thirds
    from kvws.eval.variants_measured import MakeHistories


@click.command()
@input_options
@budgets_option("12,25")
@click.option(
    "--only",
    "names",
    multiple=True,
    metavar="NAME",
    help="Measure this variant, or those of this topic, and the default. May be given again.",
)
@point_options(3)
@report_options
def variants(
    traces: tuple[Path, ...],
    model: str | None,
    profile: str | None,
    budgets: tuple[int, ...],
    names: tuple[str, ...],
    points: int,
    window_tokens: int | None,
    seed: int,
    json_path: Path | None,
) -> None:
    """Change the default in one thing at a time, at the steps that `fidelity` measures.

    A signal left out, other weights, other tokens that ask, part of the view computed anew: what
    each variant recovers of what the newest blocks alone lose, and how that differs from the
    default.
    """
    from kvws.eval.variants import some_of, variants_of

    some_of(variants_of(), names)
    if json_path is not None:
        require_writable(json_path, "--json")
    sessions = sessions_of(traces)
    judge = judge_of(model, profile)
    window_tokens = window_of(judge, window_tokens)

    from kvws.eval.report_json import versions
    from kvws.eval.variants_measured import measure_variants
    from kvws.eval.variants_report import variants_json, variants_table

    measured = some_of(variants_of(with_profile=judge.profile is not None), names)
    errors = Console(stderr=True)
    if judge.profile is None:
        said = f"{judge.name} is not calibrated: measured without content heads"
        errors.print(said, soft_wrap=True)
    cuts = cut_sessions(sessions, judge, errors, window_tokens, points, seed)
    with progress_bar(errors) as progress:
        task = progress.add_task("measuring", total=sum(cut.points for cut in cuts))
        results = measure_variants(
            cuts,
            judge.reader,
            _histories(judge),
            measured,
            budgets,
            lambda done, what: progress.update(task, completed=done, description=what),
        )
    console = Console(width=None if Console().is_terminal else 200)
    for percent in budgets:
        console.print(variants_table(results, measured, percent, seed))
    if json_path is not None:
        settings = {
            "budgets": budgets,
            "points": points,
            "seed": seed,
            "window_tokens": window_tokens,
        }
        report = {
            "command": ["kvws", *sys.argv[1:]],
            "model": model_of(judge),
            "versions": versions(),
            "settings": settings,
            **variants_json(results, measured, budgets, seed),
        }
        write_report(json_path, report)


def _histories(judge: Judge) -> MakeHistories:
    from kvws.chat.spelling import spelling_of
    from kvws.eval.history import History
    from kvws.eval.variants import layers_of

    spelling = spelling_of(judge.renderer)

    def history(
        tokens: Sequence[int], key_values: KeyValues, thirds: Thirds | None
    ) -> BlockHistory:
        profile, signals = judge.profile, FUSED.rank_signals
        if profile is not None and thirds is not None:
            profile = replace(profile, rotated_layers=layers_of(thirds, profile.layers))
            signals = (SignalName.ROTATED_MEAN,)
        return History(judge.reader, tokens, key_values, spelling, profile, signals)

    return history
