"""`kvws eval needles`: are facts found and answered that recorded sessions were planted with?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from kvws.cli.eval_inputs import (
    Judge,
    eval_options,
    figure,
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

    from kvws.eval.asking import Answered
    from kvws.eval.facts import FactSet
    from kvws.eval.needles import Haystack
    from kvws.recall.recipe import Recipe
    from kvws.replay.trace import Trace

_ROOM_TOKENS = 1200
"""For what is planted and asked, beside the episode."""


@click.command()
@eval_options
@click.option(
    "--templates",
    type=click.Choice(["development", "test"]),
    default="development",
    show_default=True,
    help="Facts to choose rules by, or to report on.",
)
@click.option(
    "--per-trace",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Facts to ask about in each trace.",
)
@click.option(
    "--probe",
    "probe_tokens",
    type=click.IntRange(min=0),
    default=512,
    show_default=True,
    help="Tokens of the window that a question is probed behind; 0 for the whole history.",
)
@click.option("--orders", is_flag=True, help="Tell the model to say them, instead of asking.")
def needles(
    traces: tuple[Path, ...],
    model: str | None,
    profile: str | None,
    budgets: tuple[int, ...],
    signals: tuple[str, ...],
    seed: int,
    json_path: Path | None,
    templates: str,
    per_trace: int,
    probe_tokens: int,
    orders: bool,
) -> None:
    """Plant facts in recorded sessions, and ask for them behind every kind of view.

    Questions come in the words of the fact and in others; some facts are out of date by then.
    """
    if json_path is not None:
        require_writable(json_path, "--json")
    sessions = [load_trace(path) for path in traces]
    judge = judge_of(model, profile)

    from kvws.eval.arms import recipes_of
    from kvws.eval.facts import DEVELOPMENT, TEST
    from kvws.eval.needle_figures import as_json
    from kvws.eval.needles import MOST_TOKENS

    require_window(judge, MOST_TOKENS + _ROOM_TOKENS)
    facts = TEST if templates == "test" else DEVELOPMENT
    recipes = recipes_of(signals, with_profile=judge.profile is not None)
    errors = Console(stderr=True)
    if judge.profile is None:
        errors.print(f"{judge.name} is not calibrated: measured without content heads")
    stacks, left_out = _haystacks(judge, sessions, facts, budgets, seed, per_trace, errors)
    answered = _ask_all(judge, stacks, recipes, budgets, seed, probe_tokens, orders, errors)
    console = Console(width=None if Console().is_terminal else 170)
    _print(console, answered, budgets)
    if left_out:
        console.print(f"left out: {left_out} facts that landed where no view has to find them")
    if json_path is not None:
        report = {
            "model": judge.name,
            "profile": judge.profile.model if judge.profile else None,
            "traces": [str(path) for path in traces],
            "templates": templates,
            "budgets_percent": budgets,
            "signals": signals,
            "seed": seed,
            "per_trace": per_trace,
            "probe_tokens": probe_tokens,
            "orders": orders,
            "left_out": left_out,
            **as_json(answered, budgets),
        }
        write_report(json_path, report)


def _haystacks(
    judge: Judge,
    sessions: Sequence[Trace],
    facts: FactSet,
    budgets: Sequence[int],
    seed: int,
    per_trace: int,
    errors: Console,
) -> tuple[list[Haystack], int]:
    """Histories with facts in them, and how many facts could not be asked for."""
    from kvws.eval.episodes import require_episodes
    from kvws.eval.needles import LEAST_TOKENS, haystacks_of

    stacks: list[Haystack] = []
    for trace in sessions:
        found = haystacks_of(
            trace,
            judge.renderer,
            facts,
            per_trace=per_trace,
            largest_percent=max(budgets),
            seed=seed,
        )
        if not found:
            errors.print(f"left out: {trace.name}, shorter than {LEAST_TOKENS} tokens")
        stacks += found
    require_episodes([stack.episode for stack in stacks], LEAST_TOKENS)
    return stacks, sum(stack.left_out for stack in stacks)


def _ask_all(
    judge: Judge,
    stacks: Sequence[Haystack],
    recipes: dict[str, Recipe],
    budgets: Sequence[int],
    seed: int,
    probe_tokens: int,
    orders: bool,
    errors: Console,
) -> list[Answered]:
    from kvws.eval.asking import Asking

    answered: list[Answered] = []
    with progress_bar(errors) as progress:
        total = sum(len(stack.needles) for stack in stacks)
        task = progress.add_task("asking for facts", total=total)
        for stack in stacks:
            asking = Asking(
                judge.reader,
                judge.renderer,
                judge.profile,
                stack,
                probe_tokens,
                as_orders=orders,
            )
            for needle in stack.needles:
                answered += asking.answers(needle, recipes, budgets, str(seed))
                progress.advance(task)
    return answered


def _print(console: Console, answered: Sequence[Answered], budgets: Sequence[int]) -> None:
    from kvws.eval.needle_figures import GROUPS, of_full_and_right

    for percent in budgets:
        for group in GROUPS:
            console.print(_arms_table(answered, group, percent))
        console.print(_templates_table(answered, percent))
        for group in ("all", "verbatim", "paraphrased"):
            shares = of_full_and_right(answered, group, percent)
            said = ", ".join(f"{share(of)} of {name}" for name, of in shares.items())
            console.print(f"{group}, {percent} %: auto answers {said}")


def _arms_table(answered: Sequence[Answered], group: str, percent: int) -> Table:
    from kvws.eval.needle_figures import by_arm

    arms = by_arm(answered, group, percent)
    count = max((of.questions for of in arms.values()), default=0)
    gated = max((of.gated_questions for of in arms.values()), default=0)
    table = Table(
        title=f"{percent} % of the history, questions: {group} ({count}, of which the full "
        f"context answers {gated})"
    )
    table.add_column("view")
    answers = ("exact", "of those", "picked", "NLL", "older likelier")
    blocks = ("first 1", "first 3", "first 8", "mean 1/rank", "all in view", "some in view")
    for column in (*answers, *blocks):
        table.add_column(column, justify="right")
    for arm, of in arms.items():
        table.add_row(
            arm,
            share(of.exact),
            share(of.gated_exact),
            figure(of.picked.value),
            figure(of.nll.value),
            figure(of.said_older.value),
            *map(figure, (of.recall_1, of.recall_3, of.recall_8, of.reciprocal_rank)),
            *map(figure, (of.all_in_view, of.some_in_view)),
        )
    return table


def _templates_table(answered: Sequence[Answered], percent: int) -> Table:
    from kvws.eval.needle_figures import by_template

    templates = by_template(answered, percent)
    table = Table(title=f"{percent} % of the history: exact answers by form of fact")
    table.add_column("form")
    table.add_column("questions", justify="right")
    arms = list(next(iter(templates.values())))
    for arm in arms:
        table.add_column(arm, justify="right")
    for template, of_arms in templates.items():
        count = max(of.questions for of in of_arms.values())
        table.add_row(template, str(count), *(figure(of_arms[a].exact.value) for a in arms))
    return table
