"""`kvws eval agent`: was in view what recorded agents looked back at?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from kvws.cli.eval_inputs import (
    eval_options,
    judge_of,
    progress_bar,
    require_window,
    share,
    write_report,
)
from kvws.replay.loaders import load_trace
from kvws.replay.report import require_writable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvws.eval.agent_native import Found


@click.command()
@eval_options
@click.option(
    "--window",
    "window_tokens",
    type=click.IntRange(min=2048),
    default=6000,
    show_default=True,
    help="Longest stretch of a session that is read at once, in tokens.",
)
@click.option(
    "--episodes",
    "at_most",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Stretches of each trace; those with a compaction first.",
)
def agent(
    traces: tuple[Path, ...],
    model: str | None,
    profile: str | None,
    budgets: tuple[int, ...],
    signals: tuple[str, ...],
    seed: int,
    json_path: Path | None,
    window_tokens: int,
    at_most: int,
) -> None:
    """Find what recorded turns repeat word for word, and files that they read again: did views
    hold the source? Only what a window of the same size does not hold counts."""
    if json_path is not None:
        require_writable(json_path, "--json")
    sessions = [load_trace(path) for path in traces]
    judge = judge_of(model, profile)
    require_window(judge, window_tokens)

    from kvws.chat.spelling import spelling_of
    from kvws.eval.agent_figures import as_json
    from kvws.eval.agent_native import Step, found_in_views, steps_of
    from kvws.eval.arms import recipes_of
    from kvws.eval.episodes import Episode, episodes, require_episodes
    from kvws.eval.points import LEAST_HISTORY_TOKENS

    recipes = recipes_of(signals, with_profile=judge.profile is not None)
    errors = Console(stderr=True)
    if judge.profile is None:
        errors.print(f"{judge.name} is not calibrated: measured without content heads")
    tested: list[tuple[Episode, list[Step]]] = []
    for trace in sessions:
        own = episodes(
            judge.renderer,
            trace,
            window_tokens=window_tokens,
            least_tokens=LEAST_HISTORY_TOKENS,
            at_most=at_most,
        )
        if not own:
            errors.print(f"left out: {trace.name}, shorter than {LEAST_HISTORY_TOKENS} tokens")
        tested += [(episode, steps_of(episode)) for episode in own]
    require_episodes([episode for episode, _ in tested], LEAST_HISTORY_TOKENS)

    spelling = spelling_of(judge.renderer)
    found: list[Found] = []
    with progress_bar(errors) as progress:
        total = sum(len(steps) for _, steps in tested)
        task = progress.add_task("choosing views", total=total)
        done = 0
        for episode, steps in tested:
            found += found_in_views(
                judge.reader,
                spelling,
                judge.profile,
                episode,
                steps,
                recipes,
                budgets,
                seed,
                on_step=lambda: progress.advance(task),
            )
            done += len(steps)
            progress.update(task, completed=done)
    turns = sum(len(episode.turns) for episode, _ in tested)
    console = Console(width=None if Console().is_terminal else 170)
    _print(console, found, budgets, turns)
    if json_path is not None:
        report = {
            "model": judge.name,
            "profile": judge.profile.model if judge.profile else None,
            "traces": [str(path) for path in traces],
            "budgets_percent": budgets,
            "signals": signals,
            "seed": seed,
            "window_tokens": window_tokens,
            "episodes": len(tested),
            "turns": turns,
            **as_json(found, budgets),
        }
        write_report(json_path, report)


def _print(console: Console, found: Sequence[Found], budgets: Sequence[int], turns: int) -> None:
    from kvws.eval.agent_figures import WANTS

    for want in WANTS:
        for percent in budgets:
            own = [f for f in found if f.want == want and f.budget_percent == percent]
            if own:
                console.print(_table(own, f"{want}, views of {percent} % of the history"))
            else:
                console.print(
                    f"{want}, {percent} %: in none of {turns} turns anything that a window of "
                    "this size does not hold. That is no fault of the recording."
                )


def _table(found: Sequence[Found], title: str) -> Table:
    from kvws.eval.agent_figures import by_arm

    arms = by_arm(found, found[0].want, found[0].budget_percent)
    some = next(iter(arms.values()))
    table = Table(
        title=f"{title}: {some.spans} spans at {some.steps} steps, "
        f"{some.beyond_compaction} of them beyond a compaction"
    )
    table.add_column("view")
    for column in ("spans in view", "source blocks in view", "steps served whole"):
        table.add_column(column, justify="right")
    for arm, of in arms.items():
        shares = (of.spans_in_view, of.blocks_in_view, of.steps_served)
        table.add_row(arm, *map(share, shares))
    return table
