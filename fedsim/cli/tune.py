"""`fedsim tune`: measure the ways to train a config's clients."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from fedsim.cli.console import Output
from fedsim.config import RunConfig
from fedsim.errors import FedsimError

if TYPE_CHECKING:
    from torch import Tensor

    from fedsim.rows.block import Ids
    from fedsim.training import Trainer


SIZES = (1, 2, 5, 10, 25, 50, 100, 250, 500, 1000)


@dataclass(frozen=True)
class Timing:
    """CPU and wall time of one way, in seconds a client."""

    path: str
    block_size: int
    cpu: float
    wall: float


def tune(
    config: Annotated[Path, typer.Argument(help="The TOML file that describes the run.")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one key, e.g. `client.lr=0.1`."),
    ] = None,
    clients: Annotated[
        int, typer.Option(min=1, help="Most clients that a measurement trains.")
    ] = 100,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each way.")] = 3,
) -> None:
    """Measure every path and block size on a config's own clients, and propose the fastest.

    Nothing is chosen by a clock inside a run: a run follows a fixed rule of model, batch and
    device, unless its config says otherwise. This says what to write there:

        fedsim tune run.toml
        fedsim run run.toml --set client.path=stacked --set client.block-size=25
    """
    settings = RunConfig.load(config, set_ or [])
    # Measured is a copy: what its clients train is released to nobody, and costs them nothing.
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
    seconds = _timed(trainer, trainer.initial(), ids, 1)[1] * len(ways_of(trainer, len(ids)))
    console.print(f"Measuring takes about {duration(seconds * (repeats + 1))}.")
    with console.status("measuring"):
        timings = measure(trainer, ids, repeats)
    report(console, timings, trainer)


def ways_of(trainer: Trainer, clients: int) -> dict[tuple[str, int], Trainer]:
    """Every path that takes the model, over block sizes up to the number of clients."""
    ways: dict[tuple[str, int], Trainer] = {}
    for path in ("stacked", "layered", "func", "plain"):
        for size in sorted({min(s, clients) for s in SIZES}):
            try:
                way = trainer.on(path, size)
            except FedsimError:
                break  # the path does not take this model
            ways.setdefault((path, way.block_size), way)
    return ways


def measure(trainer: Trainer, ids: Ids, repeats: int) -> list[Timing]:
    """The best timing of each way, the fastest first."""
    ways = ways_of(trainer, len(ids))
    best: dict[tuple[str, int], Timing] = {}
    on_cpu = trainer.device.type == "cpu"

    def cost(timing: Timing) -> float:
        # CPU time, where neighbours on the machine would stretch the wall clock.
        return timing.cpu if on_cpu else timing.wall

    vector = trainer.initial()
    # In turn, so that all of them meet the same neighbours on the machine.
    for t in range(1, repeats + 2):
        for (path, size), way in ways.items():
            cpu, wall = _timed(way, vector, ids, t)
            now = Timing(path, size, cpu / len(ids), wall / len(ids))
            known = best.get((path, size))
            if t > 1 and (known is None or cost(now) < cost(known)):
                best[path, size] = now
    return sorted(best.values(), key=cost)


def _timed(trainer: Trainer, vector: Tensor, ids: Ids, round: int) -> tuple[float, float]:
    """CPU and wall seconds that these clients' training takes."""
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in trainer.train(vector, ids, round):
        pass
    if trainer.device.type == "cuda":
        import torch

        # A kernel that was launched has not ended yet.
        torch.cuda.synchronize(trainer.device)
    return time.process_time() - cpu, time.perf_counter() - wall


def report(console: Console, timings: list[Timing], trainer: Trainer) -> None:
    """A table of what was measured, and the lines to use the fastest."""
    table = Table(title="Local training, one client update")
    for column in ("path", "block size", "CPU ms", "wall ms", "clients/s", ""):
        table.add_column(column, justify="left" if column in ("path", "") else "right")
    chosen = (
        trainer.path.name,
        min(trainer.block_size, max(timing.block_size for timing in timings)),
    )
    for timing in timings:
        table.add_row(
            timing.path,
            str(timing.block_size),
            f"{timing.cpu * 1e3:.3f}",
            f"{timing.wall * 1e3:.3f}",
            f"{1 / timing.wall:.0f}",
            "nearest to the rule's choice" if (timing.path, timing.block_size) == chosen else "",
        )
    console.print(table)
    console.print(
        f"The rule chose path '{trainer.path.name}', at most {trainer.block_size} clients a block."
    )
    console.print("Fastest here (another path changes the last digits of the results):")
    fastest = timings[0]
    console.print(
        f"  --set client.path={fastest.path} --set client.block-size={fastest.block_size}"
    )
