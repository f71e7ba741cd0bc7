"""Recorded sessions, and their steps that a model is asked at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from kvws.cli.eval_inputs import Command, Judge, options, require_window
from kvws.errors import ConfigError
from kvws.models import resolve_model
from kvws.replay.loaders import load_trace

if TYPE_CHECKING:
    from kvws.eval.points import Cut
    from kvws.replay.trace import Trace

_WINDOW_TOKENS = 6000


def point_options(points: int) -> Callable[[Command], Command]:
    """What chooses the steps; `points`: of each trace by default."""
    return options(
        click.option(
            "--points",
            type=click.IntRange(min=1),
            default=points,
            show_default=True,
            help="Most steps of each trace.",
        ),
        click.option(
            "--window",
            "window_tokens",
            type=click.IntRange(min=1536),
            help="Longest stretch of a session that is read at once, in tokens; 6000 by default, "
            "or what the model can read.",
        ),
    )


def sessions_of(paths: Sequence[Path]) -> list[Trace]:
    """Read recorded sessions.

    Raises:
        TraceError: a file is none.
        ConfigError: two sessions could not be told apart in the report.
    """
    sessions = [load_trace(path) for path in paths]
    names = [session.name for session in sessions]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"two sessions are called {twice}", hint="give each once, or rename a file"
        )
    return sessions


def window_of(judge: Judge, window_tokens: int | None) -> int:
    """The longest stretch that is read at once: as asked for, or as the model can.

    Raises:
        ConfigError: more is asked for than the model reads.
    """
    wanted = window_tokens or min(_WINDOW_TOKENS, judge.reader.window_tokens)
    require_window(judge, wanted)
    return wanted


def cut_sessions(
    sessions: Sequence[Trace],
    judge: Judge,
    errors: Console,
    window_tokens: int,
    points: int,
    seed: int,
) -> list[Cut]:
    """Choose at most so many steps of each session, and say which are left out.

    Raises:
        TraceError: there is none.
    """
    from kvws.eval.points import cut_trace, require_points

    cuts = [
        cut_trace(session, judge.renderer, window_tokens=window_tokens, points=points, seed=seed)
        for session in sessions
    ]
    for cut in cuts:
        errors.print(_left_out(cut), soft_wrap=True)
    require_points(cuts)
    return cuts


def model_of(judge: Judge) -> Mapping[str, Any]:
    """The model as a report names it."""
    from kvws.models.profiles import model_identity

    folder = resolve_model(judge.name)
    assert isinstance(folder, Path)  # it was loaded from there
    profile = judge.profile
    return {
        "name": judge.name,
        "identity": model_identity(folder),
        "profile": None if profile is None else asdict(profile),
    }


def _left_out(cut: Cut) -> str:
    reasons = ", ".join(f"{count} {why}" for why, count in cut.left_out.items())
    tested = f"{cut.trace}: tested steps: {cut.points}"
    return f"{tested}; left out: {reasons}" if reasons else tested
