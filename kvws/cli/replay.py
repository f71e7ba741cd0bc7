"""`kvws replay`: a recorded agent session through a KV workspace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvws.cli.options import engine_settings, settings_options
from kvws.config import resolve_settings
from kvws.errors import ConfigError
from kvws.recall.recipe import recipe_named
from kvws.replay.explain import explain, print_explanation, require_steps
from kvws.replay.loaders import load_trace
from kvws.replay.report import as_json, print_report, require_writable, write_json
from kvws.replay.run import ReplayedStep, ReplayOptions, SessionReplay, workspace_name
from kvws.replay.watching import watched_steps


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
@click.option(
    "--journal",
    "lines_path",
    type=click.Path(path_type=Path),
    help="Append a line of JSON there as each step ends.",
)
@click.option(
    "--explain",
    "explained",
    type=int,
    multiple=True,
    metavar="STEP",
    help="Say why each block is in the view of that step; may be given several times.",
)
@click.option("--resume", is_flag=True, help="Go on with a replay that --disk-dir has.")
def replay(
    trace: Path,
    max_steps: int,
    max_tokens: int,
    generate: int,
    compare: str | None,
    compare_every: int,
    json_path: Path | None,
    lines_path: Path | None,
    explained: tuple[int, ...],
    resume: bool,
    **flags: Any,
) -> None:
    """Replay a recorded TRACE: Claude Code, OpenHands, (mini-)SWE-agent, OpenAI chat, .xz too."""
    settings = resolve_settings(flags).settings
    limits = settings.limits()
    if resume and not settings.disk_dir:
        raise ConfigError("only a stored replay can be resumed", hint="give its --disk-dir")
    if json_path is not None:
        require_writable(json_path, "--json")
    if lines_path is not None:
        require_writable(lines_path, "--journal")
    session = load_trace(trace)
    options = ReplayOptions(
        max_steps=max_steps,
        max_tokens=max_tokens,
        generate_tokens=generate,
        compare_every=compare_every if compare else 0,
    )
    require_steps(explained, options.planned_steps(session))
    start, chosen_by = engine_settings(settings, limits)
    recipe = chosen_by.recipe
    name = workspace_name(session, trace.read_bytes(), settings.model, limits, options, recipe)

    from kvws.chat.render import ChatRenderer
    from kvws.chat.spelling import spelling_of
    from kvws.engine.launch import running_engine
    from kvws.recall.selector import Selector

    renderer = ChatRenderer(start.model)
    spelling = spelling_of(renderer)
    steps: list[ReplayedStep] = []
    errors = Console(stderr=True)
    if chosen_by.notice:
        errors.print(chosen_by.notice)
    with _progress(errors) as progress:
        task = progress.add_task("starting the engine", total=None)
        with running_engine(start) as running:
            if running.scoring:
                errors.print(f"blocks are scored {running.scoring}")
            if running.store is not None:
                errors.print(f"disk tier: {running.store.root} ({running.disk})")

            async def run_all() -> tuple[SessionReplay, dict[str, float]]:
                run = await SessionReplay.open(
                    session,
                    renderer,
                    running.engine,
                    limits,
                    options,
                    selector=Selector(recipe, spelling),
                    name=name,
                    store=running.store,
                    identity=running.identity,
                    resume=resume,
                )
                if resume and not run.restored.steps:
                    errors.print(f"no finished step is stored as {name}: from the beginning")
                progress.update(task, description="replaying", total=run.planned_steps)
                async for step in watched_steps(run, lines_path):
                    steps.append(step)
                    progress.update(task, completed=step.number)
                return run, await run.token_bytes()

            run, token_bytes = running.run(run_all())
    console = Console(width=None if Console().is_terminal else 170)
    skipped, resumption = run.skipped_steps, run.resumption(steps)
    print_report(
        console,
        session,
        limits,
        steps,
        skipped_steps=skipped,
        resumption=resumption,
        token_bytes=token_bytes,
    )
    if json_path is not None:
        report = as_json(
            session,
            settings.model,
            limits,
            steps,
            skipped_steps=skipped,
            resumption=resumption,
            token_bytes=token_bytes,
        )
        write_json(json_path, report)
    require_steps(explained, len(steps))
    for step in (steps[number - 1] for number in explained):
        found = explain(
            step.number,
            step.report,
            run.question(step),
            run.workspace,
            spelling,
            limits,
            wanted=recipe_named(settings.signals),
            recipe=recipe,
        )
        print_explanation(console, found)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
