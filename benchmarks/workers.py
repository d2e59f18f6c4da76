"""`python -m benchmarks.workers`: speed-up by a second process, in rounds that keep a core busy.

One strategy per number of workers, in turns of one round, so that other load affects all of them
equally; the fastest round of each counts. CPU seconds per round are those of all processes: if they
do not grow with the workers, sharing the work costs nothing, and a machine with a free core per
worker is faster by their number. `--ray` adds Ray's workers, `--workers` sets other numbers.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.jobs import JOBS, SEED, data_of, make_trainer
from fedsim.clients import SGD
from fedsim.cohorts import FixedCohort
from fedsim.engines import LocalGrid, RayGrid, array_record
from fedsim.federation.engines.forked import ForkedWorkerPool, helpful_workers
from fedsim.federation.engines.process import use_one_thread
from fedsim.federation.rounds import rounds_of
from fedsim.mechanisms import Clipping
from fedsim.models.networks import AdadpCIFAR
from fedsim.randomness import Randomness
from fedsim.strategies import DPFedAvg
from fedsim.training import ClientData, Trainer
from fedsim.training.batches import local_multiplications

POPULATION = 200
SPEED_UP = 1.7
"""Aim for the speed-up by two workers, if each has a core and the rule chooses two."""


def trainers() -> Iterator[tuple[str, Trainer, int]]:
    """Name, trainer and cohort size of each job."""
    for job in JOBS.values():
        yield f"{job.name}, cohort {job.cohort}", make_trainer(job, data_of(POPULATION)), job.cohort
    random = np.random.default_rng(SEED)
    x = torch.from_numpy(random.normal(size=(1200, 3, 32, 32)).astype(np.float32))
    parts = list(np.arange(1200).reshape(20, 60))
    data = ClientData(x, torch.arange(1200) % 10, parts)
    model = AdadpCIFAR()((3, 32, 32), 10)
    trainer = Trainer(
        model, SGD(lr=0.01), data, batch_size=10, epochs=1, randomness=Randomness(SEED)
    )
    yield "ADADP's CIFAR-10 net, cohort 10", trainer, 10


@dataclass
class WorkerRun:
    """A run with some number of workers, executed one round at a time."""

    trainer: Trainer
    cohort: int
    grid: LocalGrid
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        strategy = DPFedAvg(
            mechanism=Clipping(0.5),
            cohort=FixedCohort(self.cohort, self.trainer.population),
            noise_multiplier=1.0,
            seed=SEED,
        )
        initial = array_record(self.trainer.layout.unflatten(self.trainer.initial()))
        self._result = strategy
        self._rounds = rounds_of(strategy, self.grid, initial, range(1, 1000))
        self._messages = next(self._rounds)

    def round(self) -> None:
        cpu, started = self._cpu(), time.perf_counter()
        self._messages = self._rounds.send(self.grid.send_and_receive(self._messages))
        self.wall.append(time.perf_counter() - started)
        self.cpu.append(self._cpu() - cpu)

    def model(self) -> bytes:
        assert self._result.result is not None
        arrays = self._result.result.arrays
        return b"".join(arrays[name].numpy().tobytes() for name in sorted(arrays))

    def _cpu(self) -> float:
        """CPU seconds of this process and of the workers that it forked."""
        pool = self.grid._pool
        pids = [worker.pid for worker in pool.workers] if isinstance(pool, ForkedWorkerPool) else []
        nanoseconds = [int(Path(f"/proc/{p}/schedstat").read_text().split()[0]) for p in pids]
        return time.process_time() + sum(nanoseconds) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--ray", action="store_true")
    options = parser.parse_args()
    use_one_thread()
    names = [f"{count} workers" if count > 1 else "1 process" for count in options.workers]
    names += [f"ray, {count}" for count in options.workers if options.ray]
    table = Table("job: ms a round (CPU ms)", *names, "the rule", "time, first / last", "at least")
    for name, trainer, cohort in trainers():
        with ExitStack() as stack:
            grids = [LocalGrid(trainer, workers=count) for count in options.workers]
            if options.ray:
                grids += [RayGrid(trainer, workers=count) for count in options.workers]
            sides = [WorkerRun(trainer, cohort, stack.enter_context(grid)) for grid in grids]
            for side in [side for _ in range(options.rounds + 1) for side in sides]:
                side.round()
            assert len({side.model() for side in sides}) == 1
        best = [min(side.wall[1:]) for side in sides]
        cells = [
            f"{1e3 * wall:.1f} ({1e3 * min(side.cpu[1:]):.1f})"
            for wall, side in zip(best, sides, strict=True)
        ]
        rule = helpful_workers(
            local_multiplications(trainer.model, trainer.workload, trainer.layout.dtype),
            cohort,
            trainer.device,
        )
        aim = f"{SPEED_UP:g}" if rule > 1 else "one process"
        table.add_row(name, *cells, str(rule), f"{best[0] / best[-1]:.2f}", aim)
    console = Console(width=140)
    console.print(table)
    load = " ".join(f"{number:.1f}" for number in os.getloadavg())
    console.print(
        f"{os.cpu_count()} cores, load {load}: above one a core, wall time is others' too."
    )


if __name__ == "__main__":
    main()
