"""`kvws`: the command line."""

from __future__ import annotations

import sys

import click

from kvws import __version__
from kvws.cli.bench import bench
from kvws.cli.calibrate import calibrate
from kvws.cli.config import config
from kvws.cli.eval import evaluate
from kvws.cli.replay import replay
from kvws.cli.run import run
from kvws.cli.serve import serve
from kvws.cli.sessions import sessions
from kvws.errors import KvwsError


class _Cli(click.Group):
    """Prints expected failures as one line and a hint, and exits with 1."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KvwsError as error:
            click.echo(f"kvws: {error.args[0]}", err=True)
            if error.hint:
                click.echo(f"hint: {error.hint}", err=True)
            sys.exit(1)
        except KeyboardInterrupt:
            click.echo("kvws: interrupted", err=True)
            sys.exit(130)


@click.group(cls=_Cli)
@click.version_option(__version__, prog_name="kvws")
def main() -> None:
    """A KV workspace beside a coding agent."""


main.add_command(bench)
main.add_command(calibrate)
main.add_command(config)
main.add_command(evaluate)
main.add_command(replay)
main.add_command(run)
main.add_command(serve)
main.add_command(sessions)
