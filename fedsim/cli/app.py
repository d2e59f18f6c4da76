"""The command's subcommands."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Annotated, Any

import typer

import fedsim
from fedsim.cli.audit import audit
from fedsim.cli.config import config
from fedsim.cli.console import Command, ConfigCommand, Group
from fedsim.cli.deploy import deploy
from fedsim.cli.planning import partition, stats, tune
from fedsim.cli.privacy import privacy
from fedsim.cli.run import app as flower_app
from fedsim.cli.run import run
from fedsim.cli.run_directory import compare, evaluate, export, report
from fedsim.cli.sweep import sweep
from fedsim.cli.verify import key, verify
from fedsim.errors import FedsimError

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedsim {fedsim.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show fedsim's version."
        ),
    ] = False,
) -> None:
    """Private federated learning, simulated and deployed on Flower."""


def _experiment() -> tuple[Callable[..., Any], dict[str, Any]]:
    """`fedsim experiment` and its click settings; a stub if the experiments are not installed."""
    try:
        return importlib.import_module("experiments.command").experiment, {}
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("experiments"):
            raise
        return _no_experiment, {"allow_extra_args": True, "ignore_unknown_options": True}


def _no_experiment(context: typer.Context) -> None:
    """Reproduce a figure or a table of a paper; needs a source checkout."""
    raise FedsimError(
        f"`{context.command_path}` needs a source checkout of fedsim, installed with "
        "`pip install -e .`: the papers' experiments are not in the installed package."
    )


# In the order in which `fedsim --help` lists them.
for command in (
    run,
    report,
    compare,
    evaluate,
    export,
    sweep,
    privacy,
    verify,
    stats,
    partition,
    audit,
    tune,
):
    app.command(cls=ConfigCommand)(command)
_function, _settings = _experiment()
app.command("experiment", cls=Command, context_settings=_settings)(_function)
app.command(cls=Command)(key)
app.command("app", cls=Command)(flower_app)
app.add_typer(config, name="config")
app.add_typer(deploy, name="deploy")
