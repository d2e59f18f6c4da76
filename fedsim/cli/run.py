"""`fedsim run` and `fedsim app`: run a config, and run any Flower app."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from fedsim.cli.boundary import notify_of_end
from fedsim.cli.console import JsonLines, Output, Overrides, config_in
from fedsim.config import RunConfig
from fedsim.config.run_config import earlier_config
from fedsim.errors import FedsimError
from fedsim.synonyms import closest

_LEVELS = ("debug", "info", "warning", "error")


def run(
    config: Annotated[
        Path,
        typer.Argument(
            help="The TOML file that describes the run. With --resume, also its directory."
        ),
    ],
    set_: Overrides = None,
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
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the run that is in the directory.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only warnings and errors.")
    ] = False,
    json_: Annotated[
        bool, typer.Option("--json", help="Print a JSON object a line: each round, and the end.")
    ] = False,
    verbose: Annotated[bool, typer.Option("-v", help="The same as `--log-level info`.")] = False,
    log_level: Annotated[
        str, typer.Option(help="Level of the log on standard error: debug, info, warning, error.")
    ] = "warning",
) -> None:
    """Train what a config describes; write a model, its metrics and its privacy ledger.

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

    `fedsim run digits.toml --set client.lr=0.2 --out runs/lr02` trains it and writes
    config.toml (every key: it reproduces the run), metrics.csv (one row per round), ledger.jsonl
    (every private release), model.safetensors and report.html.

    A run that was interrupted or killed resumes from its last checkpoint and ends with the same
    bytes, on any engine: `fedsim run digits.toml --resume`, or `fedsim run runs/lr02 --resume`.
    """
    console = Output()
    lines = JsonLines(console)
    if json_:
        notify_of_end(lines.end)
    config, directory = _config_file(config, out, resume=resume)
    # The engine is set first: overrides may name keys that exist for this engine only.
    chosen = [] if engine is None else [f"engine.name={engine}"]
    settings = RunConfig.load(config, [*chosen, *(set_ or [])])
    if seed is not None:
        settings = settings.replace(seed=seed)
    _log_from("info" if verbose else log_level)
    # Imported here so that a mistake in the config is reported before torch is loaded.
    with console.status("importing") if not (quiet or json_) else nullcontext():
        from fedsim.cli.progress import JsonRounds, Progress, interrupted, summary
        from fedsim.runs.record import ArtefactsElsewhere
        from fedsim.runs.runner import run as run_config
    shown: Progress | None = None if quiet or json_ else Progress(console, settings)
    callbacks = [JsonRounds(lines)] if json_ else [shown] if shown else []
    directory = directory or out or Path("runs") / settings.name
    try:
        with shown or nullcontext():
            result = run_config(
                settings, out=directory, overwrite=overwrite, resume=resume, callbacks=callbacks
            )
    except ArtefactsElsewhere as where:
        if json_:
            lines.end_values["why"] = f"{where}."
        else:
            console.print(f"{where}.")
        return
    if json_:
        lines.result(result)
    elif not quiet:
        if result.ended == "interrupted":
            console.print(interrupted(result), soft_wrap=True)
        else:
            console.print(summary(settings, result))
    if result.ended == "interrupted":
        raise typer.Exit(130)


def _log_from(level: str) -> None:
    """Show fedsim's log messages of this level and above."""
    if level not in _LEVELS:
        hint = closest("", level, _LEVELS)
        raise FedsimError(f"--log-level is {level};{hint} must be {', '.join(_LEVELS)}.")
    log = logging.getLogger("fedsim")
    log.setLevel(level.upper())
    if level != "warning" and not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("fedsim: %(message)s"))
        log.addHandler(handler)


def _config_file(source: Path, out: Path | None, *, resume: bool) -> tuple[Path, Path | None]:
    """The config to run, and the directory where it is resumed, if ``source`` is a directory."""
    config = config_in(source)
    if config == source:
        return source, None
    if not resume:
        raise FedsimError(
            f"{source} is a run's directory; --resume continues the run, and to repeat it give "
            f"{config} and another --out."
        )
    if out is not None and out.resolve() != source.resolve():
        raise FedsimError(f"--out {out} is not {source}, where the run is resumed; leave it out.")
    earlier_config(config)  # reports a damaged file as such, before overrides are applied
    return config, source


def app(
    directory: Annotated[Path, typer.Argument(help="A Flower app: it has a pyproject.toml.")],
    nodes: Annotated[int, typer.Option(min=1, help="How many clients there are.")] = 10,
    set_: Overrides = None,
) -> None:
    """Run an unchanged Flower app in this process: no SuperLink, no Ray, nothing serialised.

    For example:

        fedsim app examples/plugin --nodes 4 --set num-server-rounds=3

    The app's ServerApp, ClientApp and `[tool.flwr.app.config]` are those that `flwr run` would
    use, and client i gets its `partition-id` and `num-partitions` as there. Clients run one after
    another. The app's dependencies must be installed.
    """
    from fedsim.apps.user_app import FlowerApp, run_app

    run_app(FlowerApp.load(directory, set_ or []), nodes)
