"""`fedsim run`: train what a config describes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsim.cli.console import Output
from fedsim.config import RunConfig

__all__ = ["run"]


def run(
    config: Annotated[Path, typer.Argument(help="The TOML file that describes the run.")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one key: `client.lr=0.1`."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="local, ray, simulation or deployment.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for the artefacts; `runs/<name>` by default.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Instead of the config's `seed`.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a run that is in the directory.")
    ] = False,
) -> None:
    """Train what a config describes, and leave a model, its metrics and its privacy ledger.

    A config needs only what differs from the defaults:

        name = "digits-private"
        rounds = 40

        [partition]
        clients = 479

        [cohort]
        name = "poisson"
        rate = 0.2

        [mechanism]
        name = "normalization"
        clip-norm = 1.0

        [noise]
        target-epsilon = 4.0
        delta = 1e-4

    Then `fedsim run digits.toml --set client.lr=0.2 --out runs/lr02` trains it and writes
    config.toml (complete: it reproduces the run), metrics.csv (a row a round), ledger.jsonl
    (every private release) and model.safetensors.
    """
    # Before the overrides are validated: keys may belong to one engine only.
    chosen = [] if engine is None else [f"engine.name={engine}"]
    settings = RunConfig.load(config, [*chosen, *(set_ or [])])
    if seed is not None:
        settings = settings.replace(seed=seed)
    # Only now: a mistake in the config should not wait for torch.
    console = Output()
    with console.status("importing"):
        from fedsim.cli.progress import Progress, summary
        from fedsim.runs.launch import RanElsewhere
        from fedsim.runs.runner import run as run_config
    directory = out or Path("runs") / settings.name
    try:
        with Progress(console, settings) as progress:
            result = run_config(settings, out=directory, overwrite=overwrite, observer=progress.row)
    except RanElsewhere as where:
        console.print(f"{where}.")
        return
    console.print(summary(settings, result))
    if result.ended == "interrupted":
        raise typer.Exit(130)
