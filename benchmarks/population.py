"""`python -m benchmarks.population`: cost of a round, which must not grow with the population.

Runs of a softmax over memory-mapped images, 20 per client, with cohorts of 100, each in a process
of its own: seconds to open and partition the data, CPU time per round, and peak memory. The files
are sparse, so that the 15.7 GB of images of a million clients take no disk space.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from rich.console import Console
from rich.table import Table

POPULATIONS = (10_000, 100_000, 1_000_000)
EXAMPLES, COHORT, ROUNDS = 20, 100, 12
MAX_GIGABYTES = 4.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--populations", type=int, nargs="+", default=POPULATIONS)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(options.one)))
        return
    table = Table(title=f"Cohorts of {COHORT}, {EXAMPLES} images a client")
    for column in ("clients", "opened in s", "CPU ms a round", f"GB (at most {MAX_GIGABYTES:g})"):
        table.add_column(column, justify="right")
    for clients in options.populations:
        opened, milliseconds, gigabytes = in_a_process(clients)
        cells = (f"{opened:.1f}", f"{milliseconds:.1f}", f"{gigabytes:.2f}")
        table.add_row(f"{clients:,}", *cells)
    Console().print(table)


def in_a_process(clients: int) -> list[float]:
    """`measured` in a new process."""
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.population", "--one", str(clients)],
        capture_output=True,
        text=True,
        check=True,
    )
    numbers: list[float] = json.loads(run.stdout.splitlines()[-1])
    return numbers


def measured(clients: int) -> list[float]:
    """Seconds before the first round, CPU milliseconds per round, and peak resident gigabytes."""
    import fedsim
    from fedsim.runs.callbacks import Callback, RunStatus

    class Clock(Callback):
        """Records the CPU time used up to the end of each round."""

        def __init__(self) -> None:
            self.noted: list[float] = []

        def on_start(self, status: RunStatus) -> None:
            self.started = time.perf_counter()

        def on_round(self, status: RunStatus) -> None:
            self.noted.append(time.process_time())

    clock, began = Clock(), time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        write(Path(place), clients)
        config = fedsim.RunConfig.parse(
            {
                "rounds": ROUNDS,
                "data": {"name": place, "classes": 10},
                "partition": {"clients": clients},
                "cohort": {"name": "poisson", "rate": COHORT / clients},
                "mechanism": {"name": "clipping"},
                "noise": {"multiplier": 1.0},
                "evaluate": {"every": 0},
                "engine": {"workers": 1, "device": "cpu"},
            }
        )
        fedsim.run(config, callbacks=[clock])
    # Leaves out the first rounds, which read pages that the others find in memory.
    rounds = np.diff(clock.noted)[2:]
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return [clock.started - began, 1e3 * statistics.median(rounds.tolist()), gigabytes]


def write(place: Path, clients: int) -> None:
    """Write a data set with sparse files of images, which take no disk space."""
    shape = (EXAMPLES * clients, 28, 28)
    np.lib.format.open_memmap(place / "x_train.npy", mode="w+", dtype=np.uint8, shape=shape)
    np.save(place / "y_train.npy", (np.arange(shape[0]) % 10).astype(np.uint8))
    np.save(place / "x_test.npy", np.zeros((10, 28, 28), np.uint8))
    np.save(place / "y_test.npy", np.arange(10).astype(np.uint8))


if __name__ == "__main__":
    main()
