"""What the measurements of `kvws eval` are given: options, sessions, a model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvws.config import Settings, resolve_settings
from kvws.errors import ConfigError, ModelError
from kvws.models import load_config, require_relocatable, resolve_model
from kvws.replay.report import write_json

if TYPE_CHECKING:
    from kvws.chat.render import ChatRenderer
    from kvws.eval.intervals import Estimate
    from kvws.eval.reader import Reader
    from kvws.recall.profile import Profile

Command = TypeVar("Command", bound=Callable[..., Any])


class Percents(click.ParamType[tuple[int, ...]]):
    """Percentages with commas between them, each from 1 to 99."""

    name = "percent,…"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return cast("tuple[int, ...]", value)
        try:
            percents = tuple(dict.fromkeys(int(part) for part in str(value).split(",")))
        except ValueError:
            self.fail(f"{value!r} is not a list of whole numbers, such as 12,25", param, ctx)
        if not all(0 < percent < 100 for percent in percents):
            self.fail("each is a percentage from 1 to 99", param, ctx)
        return percents


def options(*each: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Options as one decorator; `--help` lists them in this order."""

    def add(command: Command) -> Command:
        for option in reversed(each):
            command = option(command)
        return command

    return add


input_options = options(
    click.argument(
        "traces", metavar="TRACE…", nargs=-1, required=True, type=click.Path(path_type=Path)
    ),
    click.option("--model", help="Alias smollm2, or Hugging Face folder."),
    click.option("--profile", help="File of the model's retrieval profile, or auto."),
)

signals_option = click.option(
    "--signals",
    multiple=True,
    help="Measure these too: names with commas between them. May be given again.",
)

report_options = options(
    click.option("--seed", type=int, default=0, show_default=True, help="Of all that is drawn."),
    click.option(
        "--json", "json_path", type=click.Path(path_type=Path), help="Write the report there."
    ),
)


def budgets_option(default: str) -> Callable[[Command], Command]:
    """`--budgets`, with other sizes by default."""
    return click.option(
        "--budgets",
        type=Percents(),
        default=default,
        show_default=True,
        help="Sizes of the views, in percent of the history.",
    )


eval_options = options(input_options, budgets_option("12,25"), signals_option, report_options)
"""What most measurements take."""


@dataclass(frozen=True)
class Judge:
    """The model that measures.

    Attributes:
        name: as the user calls it.
        profile: None where it has none: it is measured without content heads.
    """

    name: str
    renderer: ChatRenderer
    reader: Reader
    profile: Profile | None


def judge_of(model: str | None, profile: str | None) -> Judge:
    """Load the model, in seconds.

    Raises:
        ModelError, UnsupportedModel: it is not there, or not one that recall works with.
        ProfileError: its profile is damaged, or of another model.
    """
    settings = resolve_settings({"model": model, "profile": profile}).settings
    folder = resolve_model(settings.model)
    if not isinstance(folder, Path):
        raise ModelError(
            f"{settings.model!r} is not a folder on this machine",
            hint="download the model and give its folder, or --model smollm2",
        )
    require_relocatable(load_config(folder))
    found = _profile_of(settings, folder)
    # What follows takes seconds to import.
    from kvws.engine.platform_entry import declare_torchvision_ops

    declare_torchvision_ops()  # before transformers is imported
    from kvws.chat.render import ChatRenderer
    from kvws.eval.reader import Reader

    return Judge(settings.model, ChatRenderer(folder), Reader(folder), found)


def _profile_of(settings: Settings, folder: Path) -> Profile | None:
    from kvws.models.profiles import find_profile, load_profile

    if settings.profile != "auto":
        return load_profile(Path(settings.profile).expanduser(), folder)
    found = find_profile(folder)
    return found[0] if found is not None else None


def require_window(judge: Judge, window_tokens: int) -> None:
    """Raises ConfigError when the model cannot read so many tokens."""
    if window_tokens > judge.reader.window_tokens:
        raise ConfigError(
            f"{judge.name} reads {judge.reader.window_tokens} tokens, not {window_tokens}",
            hint="lower --window",
        )


def progress_bar(errors: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=errors,
        transient=True,
    )


def write_report(path: Path, report: object) -> None:
    """Write it as JSON, which has no NaN: what cannot be said is null."""
    write_json(path, json.loads(json.dumps(report), parse_constant=lambda name: None))


def share(estimate: Estimate) -> str:
    """A share with its interval, for a table."""
    if math.isnan(estimate.value):
        return "–"
    return f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"


def figure(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.2f}"
