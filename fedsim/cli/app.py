"""The command's list of subcommands."""

from __future__ import annotations

import typer

from fedsim.cli.partition import partition
from fedsim.cli.run import run

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Private federated learning, simulated and deployed on Flower.",
)
app.command()(run)
app.command()(partition)
