"""`fedsim partition`, `stats` and `tune`: what can be learned about a config before it is run."""

from __future__ import annotations

import json
import math
import operator
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from fedsim.array_types import Ints
from fedsim.cli.console import ConfigFile, Output, Overrides, check_out
from fedsim.config import RunConfig
from fedsim.errors import FedsimError

if TYPE_CHECKING:
    from torch import Tensor

    from fedsim.runs.private_statistics import StatisticsResult
    from fedsim.training import Trainer
    from fedsim.training.paths.path_choice import PathName


CLEAR_RATIO = 1.03
"""Ratio up to which a run's default counts as fast: repeated measurements differ by about 3 %."""


def partition(
    config: ConfigFile,
    set_: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="The picture, a PNG; `runs/<name>-partition.png` if unset.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Instead of the config's `seed`.")] = None,
) -> None:
    """Show how many examples of each class each client has, as a table and a picture.

    Nothing is trained. The same seed gives the same partition as `fedsim run` does. To see what a
    smaller alpha would do to a config:

        fedsim partition run.toml --set partition.name=dirichlet --set partition.alpha=0.1

    Only the tables [data] and [partition] and the seed of the config matter here.
    """
    settings = RunConfig.load(config, set_ or [])
    if seed is not None:
        settings = settings.replace(seed=seed)
    path = out or Path("runs") / f"{settings.name}-partition.png"
    check_out(path, ".png")
    # Imported here so that a mistake in the config is reported before torch is loaded.
    import numpy as np

    from fedsim.cli.progress import column_table
    from fedsim.partitions.base import class_counts
    from fedsim.reports.partition import draw, tabulate
    from fedsim.reports.plots import save
    from fedsim.runs.data_split import partitioner, resolve_data

    data = resolve_data(settings.replace(**{"engine.device": "cpu"}))
    labels, num_classes = data.dataset.train.y.numpy(), data.dataset.num_classes
    if labels.ndim > 1 or not num_classes:
        # Targets that are not classes count as one class: only numbers of examples are shown.
        labels, num_classes = np.zeros(len(labels), dtype=np.int64), 1
    counts = class_counts(labels, data.client_indices, num_classes)
    title = f"{settings.data.name}: {partitioner(settings).title}, seed {settings.seed}"
    if settings.partition.max_examples:
        title += f", at most {settings.partition.max_examples:,} examples a client"
    console = Output()
    if data.dataset.columns:
        console.print(column_table(data.dataset.columns))
    console.print(tabulate(counts, title))
    try:
        save(draw(counts, title), path, dpi=150)
    except OSError as error:
        raise FedsimError(f"--out is {path}, which cannot be written: {error.strerror}.") from error
    console.print_files({path: "the picture"})


def tune(
    config: ConfigFile,
    set_: Overrides = None,
    clients: Annotated[
        int, typer.Option(min=1, help="How many clients a measurement trains, at most.")
    ] = 100,
    repeats: Annotated[
        int, typer.Option(min=1, help="Measurements of each path and block size.")
    ] = 3,
) -> None:
    """Measure every gradient path and block size on a config's own clients; propose the fastest.

    A run never chooses by measuring: its path and block size follow from the model, the batch and
    the device, unless its config sets them. `tune` prints the settings to write there:

        fedsim tune run.toml
        fedsim run run.toml --set client.path=layered --set client.block-size=25
    """
    settings = RunConfig.load(config, set_ or [])
    # Nothing trained here is released, so clients' state and ledgers must not be changed and no
    # budget applies.
    settings = settings.replace(**{"client.state-dir": "", "client.noise.max-epsilon": ""})
    import numpy as np

    from fedsim.federation.engines.process import use_one_thread
    from fedsim.runs.metrics import duration
    from fedsim.runs.resolve import resolve

    use_one_thread()
    trainer = resolve(settings).trainer
    sizes = np.array([trainer.data.size(i) for i in range(trainer.population)])
    ids = np.flatnonzero(sizes)[:clients]
    if not len(ids):
        raise FedsimError("no client has any data; there is nothing to measure.")
    console = Output()

    def announce(turn: float) -> None:
        console.print(f"Measuring takes about {duration(turn * repeats)} more.")

    with console.status("measuring"):
        timings = measure(trainer, ids, repeats, announce)
    report_timings(console, timings, trainer)


@dataclass(frozen=True)
class Timing:
    """CPU and wall time of a path at a block size, in seconds per client."""

    path: str
    block_size: int
    cpu: float
    wall: float


def measure(
    trainer: Trainer, ids: Ints, repeats: int, announce: Callable[[float], object] = lambda _: None
) -> list[Timing]:
    """Best timing of each path and block size, the fastest first.

    They are compared by CPU time on a CPU, since other processes on the machine prolong wall time,
    and by wall time on other devices. ``announce`` is called with the seconds that one turn over
    all of them takes.
    """
    cost = _cost(trainer)
    candidates, vector = _candidates(trainer, len(ids)), trainer.initial()
    best: dict[tuple[str, int], Timing] = {}
    begun = time.perf_counter()
    # In turns, so that other processes' load affects all equally; the first turn is a warm-up.
    for t in range(1, repeats + 2):
        if t == 2:
            announce(time.perf_counter() - begun)
        for (path, size), candidate in candidates.items():
            cpu, wall = _timed(candidate, vector, ids, t)
            timing = Timing(path, size, cpu / len(ids), wall / len(ids))
            known = best.get((path, size))
            if t > 1 and (known is None or cost(timing) < cost(known)):
                best[path, size] = timing
    return sorted(best.values(), key=cost)


def _cost(trainer: Trainer) -> Callable[[Timing], float]:
    return operator.attrgetter("cpu" if trainer.device.type == "cpu" else "wall")


def _candidates(trainer: Trainer, clients: int) -> dict[tuple[str, int], Trainer]:
    """A trainer for each path that supports the model and each block size up to ``clients``.

    They include the path and block size that a run uses by default.
    """
    candidates: dict[tuple[str, int], Trainer] = {}
    paths: tuple[PathName, ...] = ("layered", "func", "plain")
    sizes = (1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, trainer.block_size)
    for path in paths:
        for size in sorted({min(size, clients) for size in sizes}):
            try:
                candidate = trainer.on(path, size)
            except FedsimError:
                break  # the path does not support this model
            candidates.setdefault((path, candidate.block_size), candidate)
    return candidates


def _timed(trainer: Trainer, vector: Tensor, ids: Ints, round: int) -> tuple[float, float]:
    """CPU and wall seconds to train these clients once."""
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in trainer.train(vector, ids, round):
        pass
    if trainer.device.type == "cuda":
        import torch

        # Kernels run asynchronously: wait until the launched ones have ended.
        torch.cuda.synchronize(trainer.device)
    return time.process_time() - cpu, time.perf_counter() - wall


def report_timings(console: Console, timings: list[Timing], trainer: Trainer) -> None:
    """Print a table of the timings, and the options that select the fastest."""
    table = Table(title="Local training, one client update")
    for column in ("path", "block size", "CPU ms", "wall ms", "clients/s", ""):
        table.add_column(column, justify="left" if column in ("path", "") else "right")
    largest = max(timing.block_size for timing in timings)
    rule = (trainer.path.name, min(trainer.block_size, largest))
    cost, fastest, default = _cost(trainer), timings[0], None
    for timing in timings:
        if (timing.path, timing.block_size) == rule:
            default = timing
        table.add_row(
            timing.path,
            str(timing.block_size),
            f"{timing.cpu * 1e3:.3f}",
            f"{timing.wall * 1e3:.3f}",
            f"{1 / timing.wall:.0f}",
            "by default" if timing is default else "",
        )
    console.print(table)
    console.print(
        f"By default: path '{trainer.path.name}', at most {trainer.block_size} clients a block."
    )
    if default is not None and cost(default) <= CLEAR_RATIO * cost(fastest):
        console.print("Nothing measured here is clearly faster than that.")
        return
    console.print("Fastest here (another path changes the last digits of the results):")
    console.print(
        f"  --set client.path={fastest.path} --set client.block-size={fastest.block_size}"
    )


def stats(
    config: ConfigFile,
    set_: Overrides = None,
    epsilon: Annotated[
        float | None, typer.Option(help="The epsilon of all statistics together.")
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
            "--overwrite",
            help="Replace an existing run, unless it is evidence of private releases.",
        ),
    ] = False,
) -> None:
    """Release statistics of clients' data with noise, charged to a ledger.

    Means and standard deviations of inputs and of targets that are numbers, shares of classes, and
    with --quantiles histograms: together they are one release at client level, in which each
    client of the config has the same weight. Numbers are clamped to ranges that you declare without
    looking at the data. A run may then declare normalisation and ranges from these statistics:

        fedsim stats digits.toml --epsilon 1 --inputs 0,1 --together

        fedsim stats house.toml --epsilon 1 --inputs=-5,5 --targets 0,100 --quantiles

    The ledger goes to the directory that `fedsim run` would use. To add up the cost with that of
    runs on the same clients, name one ledger in all of them (privacy.ledger).
    """
    settings = RunConfig.load(config, set_ or [])
    from fedsim.privacy.durable import replace as write
    from fedsim.reports.plots import save
    from fedsim.reports.statistics_picture import draw
    from fedsim.runs.private_statistics import (
        StatisticsPlan,
        StatisticsRequest,
        private_dataset,
        refuse_spent_budget,
    )
    from fedsim.runs.runner import run

    request = StatisticsRequest(
        target_epsilon=epsilon,
        multiplier=multiplier,
        together=together,
        quantiles=quantiles,
        examples=examples or 0,
        inputs=_range("--inputs", inputs),
        targets=_range("--targets", targets),
    )
    plan = StatisticsPlan.from_config(settings, request, private_dataset(settings, request))
    directory = out or Path("runs") / settings.name
    refuse_spent_budget(plan.config)
    result = run(plan.config, out=directory, overwrite=overwrite)
    if result.ended != "finished":
        raise FedsimError(f"no statistics were released. {result.why}")
    statistics = plan.result_of(result)
    console = Output()
    console.print(_statistics_table(statistics))
    for statement in result.statements:
        console.print(
            f"All of it together is ({statement.epsilon:.4g}, {statement.delta:g})-differentially "
            f"private at client level{statement.marks}; see `fedsim "
            f"privacy {directory}`."
        )
    write(
        directory / "statistics.json", json.dumps(statistics.to_dict(), indent=2).encode() + b"\n"
    )
    path = directory / "statistics.png"
    save(draw(statistics, settings.name), path, dpi=150)
    console.print_files({path: "the picture"})


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


def _statistics_table(statistics: StatisticsResult) -> Table:
    table = Table(title=f"over {statistics.clients:,} clients, each counting the same")
    for name in ("statistic", "estimate", "error"):
        table.add_column(name, justify="left" if name == "statistic" else "right")
    for one in statistics.estimates:
        value = "unknown" if math.isnan(one.value) else f"{one.value:.4g}"
        table.add_row(one.name, value, "" if math.isnan(one.error) else f"± {one.error:.2g}")
    table.caption = "error: one standard deviation of the noise"
    return table
