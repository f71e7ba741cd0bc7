"""`kvws replay`: a recorded agent session through a KV workspace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvws.cli.options import engine_settings, settings_options
from kvws.config import resolve_settings
from kvws.replay.loaders import load_trace
from kvws.replay.report import as_json, print_report, require_writable, write_json
from kvws.replay.run import ReplayedStep, ReplayOptions, SessionReplay


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@settings_options
@click.option("--max-steps", type=click.IntRange(min=0), default=0, help="Stop after so many.")
@click.option(
    "--max-tokens", type=click.IntRange(min=0), default=0, help="Leave out longer prompts."
)
@click.option(
    "--generate",
    type=click.IntRange(min=0),
    default=0,
    help="Also decode so many tokens a step; the session goes on with the recorded answer.",
)
@click.option(
    "--compare",
    type=click.Choice(["reprefill"]),
    help="Also prefill the same view as text, nothing cached.",
)
@click.option(
    "--compare-every", type=click.IntRange(min=1), default=5, help="At every n-th recall step."
)
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write the report there."
)
def replay(
    trace: Path,
    max_steps: int,
    max_tokens: int,
    generate: int,
    compare: str | None,
    compare_every: int,
    json_path: Path | None,
    **flags: Any,
) -> None:
    """Replay a recorded TRACE: Claude Code JSONL, mini-swe-agent or OpenAI chat JSON, .xz too."""
    settings = resolve_settings(flags).settings
    limits = settings.limits()
    if json_path is not None:
        require_writable(json_path)
    session = load_trace(trace)
    options = ReplayOptions(
        max_steps=max_steps,
        max_tokens=max_tokens,
        generate_tokens=generate,
        compare_every=compare_every if compare else 0,
    )
    start = engine_settings(settings, limits)

    from kvws.engine.launch import running_engine
    from kvws.replay.render import ChatRenderer

    steps: list[ReplayedStep] = []
    with _progress() as progress:
        task = progress.add_task("starting the engine", total=None)
        with running_engine(start) as running:
            renderer = ChatRenderer(start.model)
            run = SessionReplay(session, renderer, running.engine, limits, options)
            progress.update(task, description="replaying", total=run.planned_steps)

            async def collect() -> None:
                async for step in run.steps():
                    steps.append(step)
                    progress.update(task, completed=step.number)

            running.run(collect())
    skipped = run.skipped_steps
    console = Console(width=None if Console().is_terminal else 170)
    print_report(console, session, limits, steps, skipped_steps=skipped)
    if json_path is not None:
        report = as_json(session, settings.model, limits, steps, skipped_steps=skipped)
        write_json(json_path, report)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
