"""`python -m benchmarks.local`: cohorts trained in blocks, beside a plain PyTorch loop.

Both do the same arithmetic on the same clients: six local steps of batch 10, clip to norm 1,
sum, noise, divide. The figures leave the first round out and are CPU time of one thread.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

import torch
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Result
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.adaptive import compare_adaptive
from benchmarks.jobs import JOBS, SEED, Job, data_of, trainer_of
from benchmarks.memory import measured_peak
from benchmarks.plain import plain_rounds
from fedsim.cohorts import FixedCohort
from fedsim.engines import LocalGrid, tensors
from fedsim.federation.engines.process import use_one_thread
from fedsim.mechanisms import Clipping
from fedsim.strategies import DPFedAvg
from fedsim.training import ClientData

CLIP_NORM, NOISE = 1.0, 1.0
TO_REACH = {"softmax": 0.10, "mlp": 1.5}
"""Milliseconds."""


def fedsim_rounds(
    job: Job,
    data: ClientData,
    cohort: FixedCohort,
    rounds: int,
    after: Callable[[Tensor], None],
    *,
    clip_norm: float,
    noise_multiplier: float,
    dtype: torch.dtype = torch.float32,
) -> None:
    """DPFedAvg on a LocalGrid; ``after`` gets the parameters at the end of each round."""
    trainer = trainer_of(job, data, dtype=dtype)
    strategy = DPFedAvg(
        mechanism=Clipping(clip_norm),
        cohort=cohort,
        noise_multiplier=noise_multiplier,
        seed=SEED,
        # One Gaussian a coordinate, as in the plain loop: hardened noise is made of four.
        hardened_noise=False,
        fraction_evaluate=0.0,
    )

    def on_round(_: int, result: Result) -> None:
        after(trainer.layout.flatten(tensors(result.arrays)))

    initial = ArrayRecord(trainer.layout.unflatten(trainer.initial()))
    strategy.start(LocalGrid(trainer), initial, num_rounds=rounds, on_round=on_round)


def speed(job: Job, rounds: int) -> dict[str, float]:
    """Round by round in turn, so that both meet the same neighbours on the machine."""
    data = data_of(1000)
    cohort = FixedCohort(job.cohort, 1000)
    settings: dict[str, Any] = {"clip_norm": CLIP_NORM, "noise_multiplier": NOISE}
    plain = plain_rounds(job, data, cohort, rounds, **settings)
    ours, theirs, walls = [], [], []
    clock = [time.process_time(), time.perf_counter()]

    def after(_: Tensor) -> None:
        ours.append(time.process_time() - clock[0])
        walls.append(time.perf_counter() - clock[1])
        began = time.process_time()
        next(plain)
        theirs.append(time.process_time() - began)
        clock[:] = time.process_time(), time.perf_counter()

    fedsim_rounds(job, data, cohort, rounds, after, **settings)
    updates = (rounds - 1) * job.cohort
    return {
        "clients a second": updates / sum(walls[1:]),
        "fedsim ms": sum(ours[1:]) / updates * 1e3,
        "plain ms": sum(theirs[1:]) / updates * 1e3,
        "ratio": sum(ours[1:]) / sum(theirs[1:]),
    }


def agreement(job: Job, rounds: int = 3) -> float:
    """Largest difference of the final weights, noise off, float64."""
    data = data_of(100, torch.float64)
    cohort = FixedCohort(20, 100)
    settings: dict[str, Any] = {
        "clip_norm": CLIP_NORM,
        "noise_multiplier": 0.0,
        "dtype": torch.float64,
    }
    ours: list[Tensor] = []
    fedsim_rounds(job, data, cohort, rounds, ours.append, **settings)
    *_, theirs = plain_rounds(job, data, cohort, rounds, **settings)
    return float((ours[-1] - theirs).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    use_one_thread()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    results = {}
    for name, job in JOBS.items():
        results[name] = speed(job, arguments.rounds) | {"difference": agreement(job)}
        for cohort in (0, 100, 10_000):
            results[name][f"MiB at {cohort}"] = measured_peak(name, cohort)
    adaptive = compare_adaptive()
    if arguments.json:
        print(json.dumps({"jobs": results, "adaptive": adaptive}))
        return
    report(results, adaptive)


def report(results: dict[str, dict[str, float]], adaptive: dict[str, float]) -> None:
    """The figures, with what they should be."""
    table = Table(title="CPU time a client update, one thread, first round left out")
    for column in (
        "job",
        "fedsim ms",
        "plain loop ms",
        "ratio",
        "to reach, ms",
        "clients/s",
        "differ by",
    ):
        table.add_column(column, justify="left" if column == "job" else "right")
    for name, r in results.items():
        table.add_row(
            name,
            f"{r['fedsim ms']:.3f}",
            f"{r['plain ms']:.3f}",
            f"{r['ratio']:.2f}",
            f"{TO_REACH[name]:.2f}",
            f"{r['clients a second']:.0f}",
            f"{r['difference']:.1e}",
        )
    console = Console()
    console.print(table)
    memory = Table(title="Memory that one round adds at its peak, MiB (10,000 clients)")
    for column in ("job", "100 clients a round", "two whole blocks", "10,000 clients a round"):
        memory.add_column(column, justify="left" if column == "job" else "right")
    for name, r in results.items():
        memory.add_row(name, *(f"{r[f'MiB at {n}']:.0f}" for n in (100, 0, 10_000)))
    console.print(memory)
    console.print(
        f"AdadpLR costs {adaptive['ratio']:.2f}x the CPU time of SGD a gradient on the MLP job "
        f"({adaptive['adadp ms']:.3f} against {adaptive['sgd ms']:.3f} ms; at most 1.5x)."
    )


if __name__ == "__main__":
    main()
