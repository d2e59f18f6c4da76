"""`python -m benchmarks.local`: cohorts trained in blocks, compared with a plain PyTorch loop.

Both do the same arithmetic on the same clients: six local steps of batch 10, clip to norm 1,
sum, noise, divide. They take turns of one round each, as does fedsim without compiled kernels
(`benchmarks.turns`); the first round is left out. The floor is the time of the matrix products of
a client's steps alone, by the library that torch calls.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.adaptive import compare_adaptive
from benchmarks.jobs import (
    BATCH,
    CLASSES,
    EXAMPLES,
    FEATURES,
    JOBS,
    SEED,
    Job,
    data_of,
    make_trainer,
)
from benchmarks.memory import measured_peak
from benchmarks.plain import plain_rounds
from benchmarks.turns import TurnWork, in_turns, ratio
from fedsim.cohorts import FixedCohort
from fedsim.engines import LocalGrid, array_record, tensors
from fedsim.federation.engines.process import use_one_thread
from fedsim.federation.rounds import rounds_of
from fedsim.mechanisms import Clipping
from fedsim.strategies import DPFedAvg
from fedsim.training import ClientData
from fedsim.training.paths.path_choice import KernelName

CLIP_NORM, NOISE = 1.0, 1.0
AIMS = {"softmax": 0.10, "mlp": 0.40}
"""Aims as fractions of the plain loop's time; for the MLP 0.33 with AVX-512."""
EAGER_AIM, ADAPTIVE_AIM = 1.5, 1.6


def fedsim_rounds(
    job: Job,
    data: ClientData,
    cohort: FixedCohort,
    rounds: int,
    *,
    clip_norm: float,
    noise_multiplier: float,
    dtype: torch.dtype = torch.float32,
    kernel: KernelName = "auto",
) -> Iterator[Tensor]:
    """Run DPFedAvg on a LocalGrid; yields the parameters after each round."""
    trainer = make_trainer(job, data, dtype=dtype, kernel=kernel)
    strategy = DPFedAvg(
        mechanism=Clipping(clip_norm),
        cohort=cohort,
        noise_multiplier=noise_multiplier,
        seed=SEED,
        # One Gaussian per coordinate as in the plain loop; hardened noise is the sum of four.
        hardened_noise=False,
        fraction_evaluate=0.0,
    )
    grid = LocalGrid(trainer)
    initial = array_record(trainer.layout.unflatten(trainer.initial()))
    steps = rounds_of(strategy, grid, initial, range(1, rounds + 2))
    messages = next(steps)
    for _ in range(rounds):
        messages = steps.send(grid.send_and_receive(messages))
        assert strategy.result is not None
        yield trainer.layout.flatten(tensors(strategy.result.arrays))


def products(job: Job) -> Iterator[tuple[Tensor, Tensor]]:
    """Factors of the matrix products of a client's step, the same in every step.

    They are the forward products, and the backward ones for weights and for inputs (except those of
    the first layer).
    """
    for layer, (inputs, outputs) in enumerate(pairwise((FEATURES, *job.widths, CLASSES))):
        x, delta = torch.randn(BATCH, inputs), torch.randn(BATCH, outputs)
        weight = torch.randn(outputs, inputs)
        yield x, weight.T
        yield delta.T, x
        if layer:
            yield delta, weight


def products_alone(job: Job, _: int) -> None:
    """Compute the matrix products of a cohort's steps."""
    factors = [(a, b, torch.empty(len(a), b.shape[1])) for a, b in products(job)]
    for _ in range(job.cohort * EXAMPLES // BATCH):
        for a, b, out in factors:
            torch.mm(a, b, out=out)


def speed(job: Job, rounds: int) -> dict[str, Any]:
    """Times of all sides, which take turns round by round, and their ratios."""
    data, cohort = data_of(1000), FixedCohort(job.cohort, 1000)
    settings: dict[str, Any] = {"clip_norm": CLIP_NORM, "noise_multiplier": NOISE}
    arguments = job, data, cohort, rounds + 1
    loops = {
        "fedsim": fedsim_rounds(*arguments, **settings),
        "plain": plain_rounds(*arguments, **settings),
        "eager": fedsim_rounds(*arguments, **settings, kernel="eager"),
    }
    sides: dict[str, TurnWork] = {name: partial(_next, loop) for name, loop in loops.items()}
    sides["floor"] = partial(products_alone, job)
    seconds = {name: turns[1:] for name, turns in in_turns(sides, rounds + 1).items()}
    return {
        **{f"{name} ms": median(turns) / job.cohort * 1e3 for name, turns in seconds.items()},
        "ratio": ratio(seconds["fedsim"], seconds["plain"]),
        "floor": ratio(seconds["floor"], seconds["plain"]),
        "eager": ratio(seconds["eager"], seconds["fedsim"]),
    }


def _next(loop: Iterator[Tensor], _: int) -> None:
    next(loop)


def agreement(job: Job, rounds: int = 3) -> float:
    """Largest difference between final weights of fedsim and the plain loop: float64, no noise."""
    data = data_of(100, torch.float64)
    arguments = job, data, FixedCohort(20, 100), rounds
    settings: dict[str, Any] = {
        "clip_norm": CLIP_NORM,
        "noise_multiplier": 0.0,
        "dtype": torch.float64,
    }
    *_, ours = fedsim_rounds(*arguments, **settings)
    *_, theirs = plain_rounds(*arguments, **settings)
    return float((ours - theirs).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    use_one_thread()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    results: dict[str, dict[str, Any]] = {}
    for name, job in JOBS.items():
        results[name] = speed(job, arguments.rounds) | {"difference": agreement(job)}
        for cohort in (0, 100, 10_000):
            results[name][f"MiB at {cohort}"] = measured_peak(name, cohort)
    adaptive = compare_adaptive()
    if arguments.json:
        print(json.dumps({"jobs": results, "adaptive": adaptive}, default=asdict))
        return
    report(results, adaptive)


def report(results: dict[str, dict[str, Any]], adaptive: dict[str, Any]) -> None:
    """Print the figures, with their aims."""
    table = Table(title="CPU time a client's update, one thread; 95 % intervals")
    for column in (
        "job",
        "fedsim, plain ms",
        "over plain",
        "aim",
        "products alone",
        f"eager over compiled (aim {EAGER_AIM:g})",
        "differ by",
    ):
        table.add_column(column, justify="left" if column == "job" else "right")
    for name, r in results.items():
        table.add_row(
            name,
            f"{r['fedsim ms']:.3f}, {r['plain ms']:.3f}",
            str(r["ratio"]),
            f"{AIMS[name]:.2f}",
            str(r["floor"]),
            str(r["eager"]),
            f"{r['difference']:.1e}",
        )
    console = Console(width=120)
    console.print(table)
    memory = Table(title="Memory that one round adds at its peak, MiB (10,000 clients)")
    for column in ("job", "100 clients a round", "two whole blocks", "10,000 clients a round"):
        memory.add_column(column, justify="left" if column == "job" else "right")
    for name, r in results.items():
        memory.add_row(name, *(f"{r[f'MiB at {n}']:.0f}" for n in (100, 0, 10_000)))
    console.print(memory)
    console.print(
        f"AdadpLR costs {adaptive['ratio']} times the CPU time of SGD a gradient on the MLP job "
        f"({adaptive['adadp ms']:.3f} and {adaptive['sgd ms']:.3f} ms; aim {ADAPTIVE_AIM:g})."
    )


if __name__ == "__main__":
    main()
