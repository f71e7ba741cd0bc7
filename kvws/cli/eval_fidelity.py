"""`kvws eval fidelity`: what the model says over views, against what it says over everything."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
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
    signals_option,
)
from kvws.cli.eval_points import cut_sessions, model_of, point_options, sessions_of, window_of
from kvws.errors import ConfigError
from kvws.recall.recipe import AUTO, recipe_named
from kvws.replay.report import require_writable, write_json

if TYPE_CHECKING:
    from kvws.eval.drift import Drift
    from kvws.eval.fidelity import MakeHistory, PointResult, Settings
    from kvws.eval.points import Cut


@click.command()
@input_options
@budgets_option("12,25,50")
@signals_option
@point_options(6)
@report_options
@click.option(
    "--plots",
    "plots_folder",
    type=click.Path(path_type=Path),
    help="Folder for a picture per trace, and one of all.",
)
@click.option(
    "--drift",
    "with_drift",
    is_flag=True,
    help="Also measure what it costs that KV was itself computed behind views.",
)
def fidelity(
    traces: tuple[Path, ...],
    model: str | None,
    profile: str | None,
    budgets: tuple[int, ...],
    signals: tuple[str, ...],
    points: int,
    window_tokens: int | None,
    seed: int,
    json_path: Path | None,
    plots_folder: Path | None,
    with_drift: bool,
) -> None:
    """Compare what the model says behind views with what it says behind the full context.

    Steps of recorded sessions are asked as the product would, and their recorded turns are what
    is compared: KL, top-1 agreement, likelihood. All arms of a budget get as many tokens.
    """
    if json_path is not None:
        require_writable(json_path, "--json")
    if plots_folder is not None:
        _require_folder(plots_folder)
    sessions = sessions_of(traces)
    for names in signals:
        recipe_named(names)
    judge = judge_of(model, profile)
    window_tokens = window_of(judge, window_tokens)

    from kvws.eval.arms import recipes_of
    from kvws.eval.fidelity import Settings, measure
    from kvws.eval.report_json import as_json

    has_profile = judge.profile is not None
    settings = Settings(budgets, recipes_of(signals, with_profile=has_profile), seed)
    errors = Console(stderr=True)
    if not has_profile:
        errors.print(f"{judge.name} is not calibrated: measured without content heads")
    cuts = cut_sessions(sessions, judge, errors, window_tokens, points, seed)
    make_history = _history_maker(judge)
    with progress_bar(errors) as progress:
        task = progress.add_task("measuring", total=sum(cut.points for cut in cuts))
        results = measure(
            cuts,
            judge.reader,
            make_history,
            settings,
            lambda done, what: progress.update(task, completed=done, description=what),
        )
    drifts = _drifts(cuts, judge, make_history, settings, errors) if with_drift else []
    _print(results, settings, drifts)
    if json_path is not None:
        report = as_json(
            results,
            cuts,
            settings,
            model=model_of(judge),
            command=["kvws", *sys.argv[1:]],
            drift=[asdict(drift) for drift in drifts],
        )
        report["settings"] |= {"window_tokens": window_tokens, "points": points}
        write_json(json_path, report)
    if plots_folder is not None:
        _write_plots(plots_folder, results)


def _require_folder(path: Path) -> None:
    """Raises ConfigError when no pictures can be put there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be a folder: {error}", hint="give --plots a folder that may be made"
        ) from error
    require_writable(path / "all.svg", "--plots")


def _history_maker(judge: Judge) -> MakeHistory:
    from kvws.chat.spelling import spelling_of
    from kvws.eval.history import History

    spelling = spelling_of(judge.renderer)
    return lambda tokens, key_values: History(
        judge.reader, tokens, key_values, spelling, judge.profile
    )


def _drifts(
    cuts: Sequence[Cut],
    judge: Judge,
    make_history: MakeHistory,
    settings: Settings,
    errors: Console,
) -> list[Drift]:
    from kvws.eval.drift import measure_drift

    recipe = settings.recipes[AUTO]
    with progress_bar(errors) as progress:
        task = progress.add_task("drift", total=sum(cut.points > 0 for cut in cuts))
        found: list[Drift] = []
        for drift in measure_drift(cuts, judge.reader, make_history, recipe):
            found.append(drift)
            progress.advance(task)
    return found


def _print(
    results: Sequence[PointResult], settings: Settings, drifts: Sequence[Drift]
) -> None:
    from kvws.eval.report_tables import budget_table, drift_line, groups_table, mass_table

    console = Console(width=None if Console().is_terminal else 200)
    for percent in settings.budgets:
        console.print(budget_table(results, percent, settings.seed))
        console.print(groups_table(results, percent, settings.seed))
    console.print(mass_table(results))
    if drifts:
        console.print(drift_line(drifts))


def _write_plots(folder: Path, results: Sequence[PointResult]) -> None:
    from kvws.eval.plot import kl_chart
    from kvws.eval.report import curves_of, groups_of

    charts = {"all": results, **groups_of(results, lambda result: result.trace)}
    for name, members in charts.items():
        title = f"{name}: KL of the recorded turn, mean of {len(members)} steps"
        file_name = re.sub(r"[^\w.-]+", "-", name) + ".svg"
        (folder / file_name).write_text(kl_chart(title, curves_of(members)), encoding="utf-8")
