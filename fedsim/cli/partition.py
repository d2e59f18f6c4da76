"""`fedsim partition`: show how the classes fall on the clients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from fedsim.cli.console import Output, check_out
from fedsim.config import RunConfig
from fedsim.errors import FedsimError


def partition(
    config: Annotated[Path, typer.Argument(help="The TOML file that describes the run.")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one key: `partition.alpha=0.1`."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The picture, a PNG; `runs/<name>-partition.png` if unset.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Instead of the config's `seed`.")] = None,
) -> None:
    """Show how the classes fall on the clients, and save it as a picture. Nothing is trained.

    The same seed gives the same partition as `fedsim run` does. To see what a smaller alpha
    would do to a config:

        fedsim partition run.toml --set partition.name=dirichlet --set partition.alpha=0.1

    Of the config, the tables [data] and [partition] and the seed matter here.
    """
    settings = RunConfig.load(config, set_ or [])
    if seed is not None:
        settings = settings.replace(seed=seed)
    path = out or Path("runs") / f"{settings.name}-partition.png"
    check_out(path, ".png")
    # Only now: a mistake in the config should not wait for torch and matplotlib.
    import numpy as np

    from fedsim.reports.partition import class_counts, draw, tabulate
    from fedsim.reports.plots import save
    from fedsim.runs.data_split import resolve_data
    from fedsim.runs.factories import partition as partitioner

    data = resolve_data(settings.replace(**{"engine.device": "cpu"}))
    labels, num_classes = data.dataset.train.y.numpy(), data.dataset.num_classes
    if labels.ndim > 1 or not num_classes:
        # Of other targets than a class for each example there is their number only.
        labels, num_classes = np.zeros(len(labels), dtype=np.int64), 1
    counts = class_counts(labels, data.split.train, num_classes)
    title = f"{settings.data.name}: {partitioner(settings).title}, seed {settings.seed}"
    if settings.partition.max_examples:
        title += f", at most {settings.partition.max_examples:,} examples a client"
    console = Output()
    console.print(tabulate(counts, title))
    try:
        save(draw(counts, title), path, dpi=150)
    except OSError as error:
        raise FedsimError(f"--out is {path}, which cannot be written: {error.strerror}.") from error
    console.print(Text(f"picture: {path}"), soft_wrap=True)
