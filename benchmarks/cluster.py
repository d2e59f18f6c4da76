"""`python -m benchmarks.cluster`: bytes that Ray's engine sends between (emulated) machines.

The cluster is three Ray nodes on this machine, each with a worker and an object store of its own,
and a head with the driver: all traffic crosses the loopback interface, and is counted there. As
root this runs in a network namespace of its own; otherwise other processes' traffic is counted
too. Clients' updates take no time to compute, so that a round's time does not include training.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fedsim.array_types import Ints

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.network import alone_on_loopback, loopback_bytes
from fedsim.cohorts import FixedCohort
from fedsim.engines import RayGrid, array_record
from fedsim.federation.engines.process import use_one_thread
from fedsim.mechanisms import Clipping
from fedsim.rows.block import Block, BlockTrainer
from fedsim.strategies import DPFedAvg

POPULATION, NODES = 1000, 3
MAX_SECONDS = 10.0
"""Aim for the time from the engine's start to its first round's end, on an idle machine."""


@dataclass
class Waves(BlockTrainer):
    """A trainer whose client k sends the parameters times a number of its own."""

    population: int = POPULATION

    def train(self, vector: torch.Tensor, client_ids: Ints, round: int) -> Iterator[Block]:
        """Blocks of rows that take hardly any time to compute."""
        for start in range(0, len(client_ids), 10):
            ids = client_ids[start : start + 10]
            rows = torch.stack([vector * float(k + round) for k in ids.tolist()])
            yield Block.sent(ids, rows, {"num-examples": np.ones(len(ids))})

    evaluate = train


@contextmanager
def emulated() -> Iterator[str]:
    """Start a cluster of three nodes and a head; yields its address."""
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(NODES):
        cluster.add_node(num_cpus=1)
    try:
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]


def moved(trainer: BlockTrainer, address: str, d: int, cohort: int, rounds: int) -> list[float]:
    """Seconds to the first round's end, then median seconds and megabytes of the other rounds."""
    strategy = DPFedAvg(
        mechanism=Clipping(0.5),
        cohort=FixedCohort(cohort, POPULATION),
        noise_multiplier=1.0,
        seed=1,
    )
    noted: list[tuple[float, int]] = []
    began = time.perf_counter()

    def note(_round: int, _result: object) -> None:
        noted.append((time.perf_counter(), loopback_bytes()))

    with RayGrid(trainer, workers=NODES, address=address, cpus_per_worker=1.0) as grid:
        strategy.start(grid, array_record({"w": torch.linspace(0, 1, d)}), rounds, on_round=note)
    assert strategy.report is not None
    assert strategy.report.usable == cohort
    steps = np.diff(np.array(noted), axis=0)
    seconds, sent = (statistics.median(steps[:, column].tolist()) for column in (0, 1))
    return [noted[0][0] - began, seconds, sent / 1e6]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    use_one_thread()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    alone = alone_on_loopback()
    table = Table(title=f"Ray, {NODES} emulated nodes of a worker each")
    columns = ("parameters", "cohort", "s to the first round's end", "s a round")
    for column in (*columns, "MB moved a round", "12 d a worker, MB"):
        table.add_column(column, justify="right")
    with emulated() as address:
        for d, cohort in ((100_000, 30), (1_000_000, 30), (1_000_000, 300)):
            first, seconds, sent = moved(Waves(), address, d, cohort, options.rounds)
            # To each worker the parameters in float32 and back a sum in float64, for any cohort.
            planned = NODES * 12 * d / 1e6
            cells = (f"{first:.1f}", f"{seconds:.2f}", f"{sent:.1f}", f"{planned:.1f}")
            table.add_row(f"{d:,}", str(cohort), *cells)
    console = Console(width=120)
    console.print(table)
    whose = "" if alone else " (what others sent on this machine included)"
    console.print(
        f"First round within {MAX_SECONDS:g} s; bytes do not grow with the cohort{whose}."
    )


if __name__ == "__main__":
    main()
