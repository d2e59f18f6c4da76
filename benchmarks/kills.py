"""Kill runs at random, resume them, and compare them with runs that were not killed.

    python -m benchmarks.kills [--seed 2] [--deaths SIGTERM,Ray]
        [--out benchmarks/results/kills.txt]

Each run is a fork of this process, so that it need not import anything. Killed at random instants
are runs whose clients keep a rate or protect their own examples, with SCAFFOLD, with personal
heads, on several workers and on Ray, and sweeps. Others die before random steps that touch the
disk, in the middle of a checkpoint, of a ledger's line and of a metrics row, on a full disk, on a
disk that becomes read-only, and by SIGTERM. The last ones lose a worker, which they survive.

A resumed run must have the reference's parameters, rows and charges, and equal final hashes of
ledgers unless a line was torn. Mounting disks needs root: otherwise these deaths are left out.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

import fedsim
from benchmarks.deaths import DEATHS, ROUNDS, Death
from fedsim import RunConfig
from fedsim.errors import FedsimError
from fedsim.privacy import Ledger
from fedsim.runs.directory import RunDirectory
from fedsim.runs.sweep import grid_runs, parse_axes, run_sweep

BASE = RunConfig.parse(
    {
        "rounds": ROUNDS,
        "partition": {"clients": 30, "max-examples": 600},
        "client": {"batch-size": 5},
        "cohort": {"name": "poisson", "rate": 0.5},
        "evaluate": {"every": 5},
        "checkpoint": {"every": 2},
        "engine": {"device": "cpu"},
    }
)
PRIVATE = {
    "mechanism.name": "quantile-clipping",
    "mechanism.bit-noise": 0.5,
    "noise.multiplier": 1.0,
    "server.momentum": 0.9,
}
KEPT = {"client.state": "client"}
RATES = {**PRIVATE, **KEPT, "client.name": "adadp-lr"}
JOBS: dict[str, dict[str, Any]] = {
    "rates": RATES,
    "examples": {**KEPT, "client.mechanism.name": "clipping", "client.noise.multiplier": 1.0},
    "scaffold": {**KEPT, "client.name": "scaffold", "mechanism.weighting": "uniform"},
    "heads": {
        **KEPT,
        "model.name": "mlp",
        "model.widths": "8",
        "model.personal": "fc2.*",
        "evaluate.every": 0,
        "evaluate.clients-every": 5,
    },
    "workers": {**RATES, "engine.workers": 2},
    "ray": {**RATES, "engine.name": "ray", "engine.workers": 2},
    "sweep": PRIVATE,
}
AXES = ["client.lr=0.05,0.1", "seed=1,2"]


def run(job: str, directory: Path) -> None:
    """Start a run, or resume it."""
    config = BASE.replace(**JOBS[job])
    if job == "sweep":
        run_sweep(grid_runs(config, parse_axes(AXES)), directory)
    else:
        fedsim.run(config, out=directory, resume=True)


def runs_of(job: str, directory: Path) -> list[Path]:
    """The run's directory, or those of a sweep's members."""
    return sorted(directory.glob("*=*")) if job == "sweep" else [directory]


def forked(do: Callable[[], object]) -> int:
    """Run ``do`` in a forked child; its exit status, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        status = 1
        try:
            do()
            status = 0
        except (OSError, FedsimError, KeyboardInterrupt) as error:
            print(f"    {type(error).__name__}: {error}", file=sys.stderr)
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def reached(directory: Path) -> dict[str, Any]:
    """A run's model, rows and charges, without times and the epsilon of each row."""
    operators = ("seconds", "clients-per-second", "epsilon", "example-epsilon")
    rows = RunDirectory(directory).metrics_file.rows()
    ledgers = [Ledger.read(path, delta=1e-5) for path in _ledgers(directory)]
    return {
        "model": {
            name: tensor.numpy().tobytes()
            for name, tensor in load_file(RunDirectory(directory).model).items()
        },
        "rows": [{k: v for k, v in row.items() if k not in operators} for row in rows],
        "charged": [[(entry.round, entry.event) for entry in ledger.entries] for ledger in ledgers],
        "last epsilon": [rows[-1].get(name) for name in ("epsilon", "example-epsilon")],
    }


def _ledgers(directory: Path) -> list[Path]:
    return sorted(directory.glob("ledger*.jsonl"))


def heads(directory: Path) -> list[tuple[str, ...]]:
    """Hashes of the ledgers."""
    return [tuple(Ledger.read(path, delta=1e-5).heads) for path in _ledgers(directory)]


@contextmanager
def place_for(death: Death, chosen: random.Random, root: Path) -> Iterator[Path]:
    """A directory for one run, on the disk that its way to die needs."""
    root.mkdir()
    if death.disk is None:
        yield root / "run"
        return
    disk = root / "disk"
    disk.mkdir()
    death.disk.mount(chosen, disk)
    try:
        yield disk / "run"
    finally:
        subprocess.run(["umount", disk], check=True)


def die_and_resume(
    death: Death, number: int, seed: int, root: Path, seconds: float, expected: list[Any]
) -> Counter[str]:
    """Let one run die, resume it, and compare it with the expected result."""
    chosen = random.Random(f"{seed} {death.name} {death.job} {number}")
    counts = Counter(runs=1)

    def die(directory: Path) -> None:
        death.before(chosen, seconds)
        run(death.job, directory)

    with place_for(death, chosen, root) as directory:
        counts["died"] += forked(partial(die, directory)) != 0
        if death.disk is not None:
            death.disk.mend(directory.parent)
        status = forked(partial(run, death.job, directory))
        runs = runs_of(death.job, directory)
        counts["same"] += status == 0 and [reached(one) for one in runs] == expected[0]
        counts["heads"] += [heads(one) for one in runs] == expected[1]
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="kinds of runs, such as 'sweep heads'")
    parser.add_argument("--deaths", default="", help="parts of their names, with commas between")
    arguments = parser.parse_args()
    deaths = [death for death in DEATHS if death.disk is None or os.geteuid() == 0]
    if arguments.only:
        deaths = [death for death in deaths if death.job in arguments.only.split()]
    parts = arguments.deaths.split(",")
    deaths = [death for death in deaths if any(part in death.name for part in parts)]
    lines = [f"{'death':36} {'runs':>5} {'died':>5} {'same':>5} {'equal heads':>12}"]
    total: Counter[str] = Counter()
    took: dict[str, float] = {}
    expected: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory(prefix="fedsim-kills-") as temporary:
        root = Path(temporary)
        forked(partial(run, "rates", root / "warm"))
        for job in dict.fromkeys(death.job for death in deaths):
            started = time.perf_counter()
            assert forked(partial(run, job, root / job)) == 0
            took[job] = time.perf_counter() - started
            runs = runs_of(job, root / job)
            expected[job] = [[reached(one) for one in runs], [heads(one) for one in runs]]
        for place, death in enumerate(deaths):
            counts: Counter[str] = Counter()
            for number in range(death.times):
                where = root / f"{place}-{number}"
                counts += die_and_resume(
                    death, number, arguments.seed, where, took[death.job], expected[death.job]
                )
            total += counts
            lines.append(_line(death.name, counts))
            print(lines[-1], flush=True)
    lines.append(_line("all", total))
    heading = f"Runs of {ROUNDS} rounds, {took[deaths[0].job]:.1f} s; seed {arguments.seed}."
    text = "\n".join([heading, "", *lines])
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")


def _line(name: str, counts: Counter[str]) -> str:
    return (
        f"{name:36} {counts['runs']:5} {counts['died']:5} {counts['same']:5} {counts['heads']:12}"
    )


if __name__ == "__main__":
    main()
