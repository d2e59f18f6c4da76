"""`python -m benchmarks.asynchronous`: cost of buffered asynchronous rounds, on one core.

A softmax over images (20 per client, two steps of 10), a concurrency of 1,000 and a buffer of 100,
on devices whose time for a task is lognormal with a mean of 300 s: the schedule alone, a release
beside a synchronous round of as many updates, and seven virtual days of a million devices. All
times are CPU time; memory is without pages of the memory-mapped images.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.population import write

CONCURRENCY, BUFFER, SECONDS, STEPS = 1_000, 100, 300.0, 2
DEVICES, DAYS = 1_000_000, 7
COMPARED, WARM = 120, 40
"""Rounds that are compared, after as many as fill the releases to come."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=DEVICES)
    parser.add_argument("--days", type=float, default=DAYS)
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        kind, devices, rounds = options.one
        print(json.dumps(measured(kind, int(devices), int(rounds))))
        return
    table = Table(title=f"Concurrency {CONCURRENCY:,}, buffer {BUFFER}: CPU time on one core")
    for column in ("", "measured"):
        table.add_column(column)
    for buffer in (10, BUFFER):
        seconds, updates = of_schedule(buffer)
        label = f"schedule of {updates:,} updates (as many starts as hand-ins), buffer {buffer}"
        table.add_row(label, f"{seconds:.1f} s")
    rounds = WARM + COMPARED
    for private in ("private", "bare"):
        alone = in_a_process(f"fixed-{private}", 20_000, rounds)["milliseconds"]
        buffered = in_a_process(f"buffered-{private}", 20_000, rounds)["milliseconds"]
        table.add_row(
            f"a release of {BUFFER} updates, {private}",
            f"{buffered:.1f} ms; a synchronous round {alone:.1f} ms: {buffered / alone:.2f} times",
        )
    releases = round(CONCURRENCY * options.days * 86_400 / SECONDS / BUFFER)
    week = in_a_process("buffered-private", options.devices, releases)
    table.add_row(
        f"{options.devices:,} devices, {options.days:g} days, {releases * BUFFER:,} updates",
        f"{week['total'] / 60:.1f} min, {week['gigabytes']:.2f} GB",
    )
    Console().print(table)


def of_schedule(buffer: int) -> tuple[float, int]:
    """CPU seconds of a schedule of a million updates, and their number."""
    from fedsim.cohorts import BufferedCohort
    from fedsim.federation.buffered.schedule import ReleaseSchedule

    seconds = SECONDS * np.exp(np.random.default_rng(1).normal(size=DEVICES) - 0.5)
    cohort = BufferedCohort(
        CONCURRENCY, buffer, participations=100, rounds=DEVICES // buffer, population=DEVICES
    )
    began = time.process_time()
    schedule = ReleaseSchedule.of(cohort, seconds, 1)
    return time.process_time() - began, len(schedule)


def in_a_process(kind: str, devices: int, rounds: int) -> dict[str, float]:
    """`measured` in a new process."""
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.asynchronous", "--one", kind, str(devices), str(rounds)],
        capture_output=True,
        text=True,
        check=True,
    )
    numbers: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return numbers


def measured(kind: str, devices: int, rounds: int) -> dict[str, float]:
    """CPU milliseconds of a round (median), CPU seconds of all, and gigabytes of memory."""
    import fedsim
    from fedsim.runs.callbacks import Callback, RunStatus

    class Clock(Callback):
        """Records the CPU time used up to the end of each round, and the most memory."""

        def __init__(self) -> None:
            self.noted: list[float] = []
            self.gigabytes = 0.0

        def on_round(self, status: RunStatus) -> None:
            self.noted.append(time.process_time())
            if status.round % 100 == 0:
                self.gigabytes = max(self.gigabytes, anonymous_gigabytes())

    cohort, privacy = kind.split("-")
    clock = Clock()
    with tempfile.TemporaryDirectory() as place:
        write(Path(place), devices)
        fedsim.run(config_of(place, cohort, privacy, devices, rounds), callbacks=[clock])
    spent = np.diff(clock.noted)[WARM:]
    return {
        "milliseconds": 1e3 * statistics.median(spent.tolist()),
        "total": time.process_time(),
        "gigabytes": clock.gigabytes,
    }


def anonymous_gigabytes() -> float:
    """Resident memory of this process, without pages of files: the images are memory-mapped."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith("RssAnon"))
    return int(kilobytes) / 2**20


def config_of(place: str, cohort: str, privacy: str, devices: int, rounds: int) -> Any:
    """The config of a run on images in this directory."""
    import fedsim

    cohorts: dict[str, dict[str, Any]] = {
        "fixed": {"name": "fixed", "size": BUFFER},
        "buffered": {
            "name": "buffered",
            "concurrency": CONCURRENCY,
            "buffer": BUFFER,
            "participations": 1_000_000,
        },
    }
    tree: dict[str, Any] = {
        "rounds": rounds,
        "data": {"name": place, "classes": 10},
        "partition": {"clients": devices},
        "client": {"steps": STEPS},
        "cohort": cohorts[cohort],
        "mechanism": {"name": "none", "weighting": "uniform"},
        "evaluate": {"every": 0},
        "engine": {"workers": 1, "device": "cpu"},
    }
    if privacy == "private":
        tree |= {"mechanism": {"name": "clipping"}, "noise": {"multiplier": 1.0}}
    if cohort == "buffered":
        median = SECONDS / math.exp(0.5)
        tree["devices"] = {"seconds-per-step": median / STEPS, "spread": 1.0}
    return fedsim.RunConfig.parse(tree)


if __name__ == "__main__":
    main()
