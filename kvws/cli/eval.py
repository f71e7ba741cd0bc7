"""`kvws eval`: what recall is worth, measured without an engine."""

from __future__ import annotations

import click

from kvws.cli.eval_agent import agent
from kvws.cli.eval_fidelity import fidelity
from kvws.cli.eval_needles import needles
from kvws.cli.eval_shortlist import shortlist
from kvws.cli.eval_variants import variants


class _DefaultsToFidelity(click.Group):
    """`kvws eval TRACE` means `kvws eval fidelity TRACE`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            assert fidelity.name is not None  # click derives it
            args = [fidelity.name, *args]
        return super().parse_args(ctx, args)


@click.group("eval", cls=_DefaultsToFidelity)
def evaluate() -> None:
    """Measure recall on recorded sessions: `kvws eval TRACE…` is short for `fidelity`."""


evaluate.add_command(agent)
evaluate.add_command(fidelity)
evaluate.add_command(needles)
evaluate.add_command(shortlist)
evaluate.add_command(variants)
