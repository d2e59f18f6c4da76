"""The command's list of subcommands."""

from __future__ import annotations

from typing import Annotated

import typer

import fedsim
from fedsim.cli.audit import audit
from fedsim.cli.command import Command, ConfigCommand, Group
from fedsim.cli.config import config
from fedsim.cli.deploy import deploy
from fedsim.cli.experiment import experiment
from fedsim.cli.flower_app import app as flower_app
from fedsim.cli.partition import partition
from fedsim.cli.privacy import privacy
from fedsim.cli.report import compare, report
from fedsim.cli.run import run
from fedsim.cli.saved import evaluate, export
from fedsim.cli.sweep import sweep
from fedsim.cli.tune import tune

__all__ = ["app"]

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"fedsim {fedsim.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Say which fedsim this is."
        ),
    ] = False,
) -> None:
    """Private federated learning, simulated and deployed on Flower."""


for command in (
    run,
    report,
    compare,
    evaluate,
    export,
    sweep,
    privacy,
    partition,
    audit,
    tune,
):
    app.command(cls=ConfigCommand)(command)
app.command(cls=Command)(experiment)
app.command("app", cls=Command)(flower_app)
app.add_typer(config, name="config")
app.add_typer(deploy, name="deploy")
