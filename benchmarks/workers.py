"""`python -m benchmarks.workers`: what a second Ray worker brings, on jobs that keep a core busy.

Seconds a round of the local engine and of Ray with one worker and with two, each in a process
of its own; the median of a run's rounds, the first left out. The server's own work (bounding,
summing, noise) stays on the cores that the workers share with it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

__all__ = ["main"]

JOBS = {
    "MLP 784-256-256-10, 100 clients, 18 steps": (
        (784,),
        {
            "partition": {"clients": 100},
            "model": {"name": "mlp", "widths": "256,256"},
            "client": {"lr": 0.05, "batch-size": 10, "epochs": 3},
        },
    ),
    "ADADP's CIFAR-10 net, 40 clients, 6 steps": (
        (32, 32, 3),
        {
            "partition": {"clients": 40},
            "model": {"name": "adadp-cifar"},
            "client": {"lr": 0.05, "batch-size": 10},
        },
    ),
}
WAYS = {"local": 0, "ray, 1 worker": 1, "ray, 2 workers": 2}
OWN = 60  # examples of a client


def main(rounds: int = 8) -> None:
    table = Table("job, seconds a round", *WAYS, "1 worker / 2 workers")
    for job in JOBS:
        seconds = [measured(job, workers, rounds) for workers in WAYS.values()]
        table.add_row(job, *(f"{s:.3f}" for s in seconds), f"{seconds[1] / seconds[2]:.2f}")
    Console().print(table)


def measured(job: str, workers: int, rounds: int) -> float:
    """Seconds a round, in a process of its own; no workers: the local engine."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.workers", json.dumps([job, workers, rounds])],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        sys.exit(done.stderr)
    return float(done.stdout.split()[-1])


def one(job: str, workers: int, rounds: int) -> float:
    import fedsim

    shape, settings = JOBS[job]
    examples = OWN * settings["partition"]["clients"]
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as place:
        data = Path(place) / "data.npz"
        x = random.normal(size=(examples, *shape)).astype(np.float32)
        y = np.arange(examples) % 10
        np.savez(data, x_train=x, y_train=y, x_test=x[:10], y_test=y[:10])
        engine = {"name": "ray", "workers": workers} if workers else {"name": "local"}
        config = fedsim.RunConfig.parse(
            settings
            | {
                "rounds": rounds,
                "data": {"name": str(data)},
                "mechanism": {"name": "clipping"},
                "noise": {"multiplier": 1.0},
                "evaluate": {"every": 0},
                "engine": engine,
            }
        )
        result = fedsim.run(config)
    return statistics.median(row["seconds"] for row in result.metrics if row["round"] > 1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(one(*json.loads(sys.argv[1])))
    else:
        main()
