"""`fedsim stats`: private statistics of clients' data, before anything is trained on them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fedsim.cli.console import ConfigFile, Output, Overrides
from fedsim.config import RunConfig
from fedsim.errors import FedsimError

if TYPE_CHECKING:
    from fedsim.runs.statistics import StatisticsResult


def stats(
    config: ConfigFile,
    set_: Overrides = None,
    epsilon: Annotated[
        float | None, typer.Option(help="The epsilon that all statistics together may cost.")
    ] = None,
    multiplier: Annotated[
        float | None,
        typer.Option(help="In its place: the noise multiplier of the release."),
    ] = None,
    inputs: Annotated[
        str | None,
        typer.Option(metavar="LOW,HIGH", help="The range that inputs are clamped to."),
    ] = None,
    targets: Annotated[
        str | None,
        typer.Option(metavar="LOW,HIGH", help="The range of targets that are numbers."),
    ] = None,
    together: Annotated[
        bool,
        typer.Option("--together", help="Pool all entries of an input, rather than each feature."),
    ] = False,
    quantiles: Annotated[
        bool, typer.Option("--quantiles", help="Histograms and quantiles too.")
    ] = False,
    examples: Annotated[
        int | None,
        typer.Option(min=1, help="Also the mean number of examples, clamped to so many a client."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for the ledger and the rest; `runs/<name>`.")
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Replace an existing run; its ledger is archived and still counts."
        ),
    ] = False,
) -> None:
    """Release statistics of clients' data with noise, charged to a ledger.

    Means and standard deviations of inputs and of targets that are numbers, shares of classes, and
    with --quantiles histograms: together they are one release at client level, in which each
    client of the config counts the same. Numbers are clamped to ranges that you declare without
    looking at the data. A run may then declare normalisation and ranges from these statistics:

        fedsim stats digits.toml --epsilon 1 --inputs 0,1 --together

        fedsim stats house.toml --epsilon 1 --inputs=-5,5 --targets 0,100 --quantiles

    The ledger goes to the directory that `fedsim run` would use. A later run with --overwrite
    archives it and counts it in its own statement.
    """
    settings = RunConfig.load(config, set_ or [])
    from fedsim.privacy.durable import replace as write
    from fedsim.reports.plots import save
    from fedsim.reports.statistics import draw
    from fedsim.runs.data_split import resolve_data
    from fedsim.runs.runner import run
    from fedsim.runs.statistics import StatisticsPlan, StatisticsRequest

    request = StatisticsRequest(
        target_epsilon=epsilon,
        multiplier=multiplier,
        together=together,
        quantiles=quantiles,
        examples=examples or 0,
        inputs=_range("--inputs", inputs),
        targets=_range("--targets", targets),
    )
    dataset = resolve_data(settings.replace(**{"engine.device": "cpu"})).dataset
    plan = StatisticsPlan.of(settings, request, dataset)
    directory = out or Path("runs") / settings.name
    result = run(plan.config, out=directory, overwrite=overwrite)
    statistics = plan.result_of(result)
    console = Output()
    console.print(_table(statistics))
    for statement in result.statements:
        console.print(
            f"All of it together is ({statement.epsilon:.4g}, {statement.delta:g})-differentially "
            f"private at client level{', simulated' if statement.simulated else ''}; "
            f"`fedsim privacy {directory}` says more."
        )
    write(
        directory / "statistics.json", json.dumps(statistics.to_dict(), indent=2).encode() + b"\n"
    )
    path = directory / "statistics.png"
    save(draw(statistics, settings.name), path, dpi=150)
    console.print(f"picture: {path}", soft_wrap=True)


def _range(option: str, text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        low, high = (float(number) for number in text.split(","))
    except ValueError:
        low, high = math.nan, math.nan
    if not -math.inf < low < high < math.inf:
        raise FedsimError(f"{option} is {text!r}; it must be LOW,HIGH, such as 0,1.")
    return low, high


def _table(statistics: StatisticsResult) -> Table:
    table = Table(title=f"over {statistics.clients:,} clients, each counting the same")
    for name in ("statistic", "estimate", "error"):
        table.add_column(name, justify="left" if name == "statistic" else "right")
    for one in statistics.estimates:
        value = "unknown" if math.isnan(one.value) else f"{one.value:.4g}"
        table.add_row(one.name, value, "" if math.isnan(one.error) else f"± {one.error:.2g}")
    table.caption = "error: one standard deviation of the noise"
    return table
