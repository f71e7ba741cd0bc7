"""`kvws eval shortlist`: what it loses to look closely at few blocks of a long session."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console

from kvws.cli.eval_inputs import (
    Percents,
    input_options,
    judge_of,
    progress_bar,
    report_options,
    require_window,
    write_report,
)
from kvws.cli.eval_points import model_of, sessions_of
from kvws.errors import ProfileError
from kvws.replay.report import require_writable


@click.command()
@input_options
@click.option(
    "--tokens",
    type=click.IntRange(min=8192),
    default=200_000,
    show_default=True,
    help="Length of the session that is made of the traces.",
)
@click.option(
    "--facts",
    type=click.IntRange(min=1),
    default=24,
    show_default=True,
    help="Facts to plant; each is asked for in its own words and in others.",
)
@click.option(
    "--turns",
    type=click.IntRange(min=0),
    default=24,
    show_default=True,
    help="Recorded turns of the session's second half to choose blocks for.",
)
@click.option(
    "--shares",
    type=Percents(),
    default="25,12,6",
    show_default=True,
    help="Sizes of the shortlists, in percent of the blocks that compete.",
)
@report_options
def shortlist(
    traces: tuple[Path, ...],
    model: str | None,
    profile: str | None,
    tokens: int,
    facts: int,
    turns: int,
    shares: tuple[int, ...],
    seed: int,
    json_path: Path | None,
) -> None:
    """Choose blocks from all of a long session, and from shortlists of them.

    The traces are put one behind the other, in the order given, and read in stretches; facts are
    planted in them and asked for at the end.
    """
    if json_path is not None:
        require_writable(json_path, "--json")
    sessions = sessions_of(traces)
    judge = judge_of(model, profile)
    if judge.profile is None:
        raise ProfileError(
            f"{judge.name} is not calibrated: without content heads there is no shortlist",
            hint="make a profile with kvws calibrate",
        )

    from kvws.chat.spelling import spelling_of
    from kvws.eval.report_json import versions
    from kvws.eval.shortlisting import (
        STRETCH_TOKENS,
        Compared,
        Comparison,
        index_session,
        require_places,
    )
    from kvws.eval.shortlisting_report import shortlist_json, shortlist_table
    from kvws.eval.shortlisting_session import long_session

    require_window(judge, STRETCH_TOKENS)
    errors = Console(stderr=True)
    with errors.status("putting the traces together"):
        session = long_session(
            sessions, judge.renderer, tokens=tokens, facts=facts, turns=turns, seed=seed
        )
    require_places(session, shares)
    compared: list[Compared] = []
    with progress_bar(errors) as progress:
        task = progress.add_task("reading", total=len(session.tokens))
        index = index_session(
            judge.reader,
            session,
            judge.profile,
            lambda done, what: progress.update(
                task, completed=done, description=f"reading {what}"
            ),
        )
        progress.update(task, completed=len(session.tokens), description="read")
        comparison = Comparison(judge.reader, session, index, spelling_of(judge.renderer))
        asking = progress.add_task("asking", total=len(session.questions))
        for each in comparison.compared(shares):
            compared.append(each)
            progress.update(asking, completed=len(compared), description=f"asking: {each.kind}")
    console = Console(width=None if Console().is_terminal else 170)
    console.print(shortlist_table(compared, shares))
    if json_path is not None:
        report = {
            "command": ["kvws", *sys.argv[1:]],
            "model": model_of(judge),
            "versions": versions(),
            "traces": [{"trace": s.trace, "first_token": s.first_token} for s in session.sources],
            "settings": {
                "tokens": tokens,
                "facts": facts,
                "turns": turns,
                "shares_percent": shares,
                "seed": seed,
            },
            "session_tokens": len(session.tokens),
            **shortlist_json(compared, shares),
        }
        write_report(json_path, report)
