"""Cost of a round's noise for each kind of noise: seconds, and memory in vectors of float64.

    python -m benchmarks.correlated                     # a million weights
    python -m benchmarks.correlated --weights 100000000 --noises independent lambda-cgd --round 3

Each kind runs in a process of its own, in a plan of 40 rounds, with the sum but without clients.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.memory import resident

NOISES = ("independent", "lambda-cgd", "banded-4", "banded-16", "blt", "tree")
ROUNDS = 40


def measured(name: str, weights: int, rounds: int) -> tuple[float, float]:
    """Seconds of the last round, and peak memory in vectors; call it once per process."""
    import torch

    from fedsim.cohorts import CyclicCohort
    from fedsim.federation.aggregation.server_sum import NoiseSources
    from fedsim.federation.engines.process import use_one_thread
    from fedsim.mechanisms import Clipping, Releaser
    from fedsim.mechanisms.base import State
    from fedsim.privacy.plan import ReleasePlan
    from fedsim.randomness import Randomness
    from fedsim.registry import find
    from fedsim.rows.layout import Layout

    use_one_thread()
    kind, _, bands = name.partition("-") if name.startswith("banded") else (name, "", "")
    options = {"bands": int(bands)} if bands else {}
    noise = find("noise", kind, "noise.name")(1.0, **options)
    cohort = CyclicCohort(ROUNDS, population=1000)
    plan = ReleasePlan(
        level="client", sampler=cohort, mechanism=Clipping(1.0), noise=noise, rounds=ROUNDS
    )
    layout = Layout.of({"weight": torch.empty(1, dtype=torch.float32).expand(weights)})
    releaser, sources = Releaser(plan, layout), NoiseSources(Randomness(1), plan.noise)
    before = resident("VmRSS")
    state: State = {}
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak (VmHWM)
    seconds = 0.0
    for number in range(1, rounds + 1):
        started = time.perf_counter()
        released = releaser.release(releaser.start(state), sources.round_source(number))
        state, seconds = released.state, time.perf_counter() - started
    return seconds, (resident("VmHWM") - before) * 2**20 / 8 / weights


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=int, default=1_000_000)
    parser.add_argument("--noises", nargs="*", default=NOISES, choices=NOISES)
    parser.add_argument("--round", type=int, default=20, help="which round is timed")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        print(*measured(given.here, given.weights, given.round))
        return
    print(
        "| noise | seconds | of independent noise | peak, in vectors |\n| --- | --- | --- | --- |"
    )
    first = 0.0
    for name in given.noises:
        command = ["--here", name, "--weights", str(given.weights)]
        command += ["--round", str(given.round)]
        run = subprocess.run(
            [sys.executable, "-m", "benchmarks.correlated", *command],
            capture_output=True,
            text=True,
            check=True,
        )
        seconds, vectors = map(float, run.stdout.split())
        first = first or seconds
        print(f"| {name} | {seconds:.3g} | {seconds / first:.2f} | {vectors:.1f} |", flush=True)


if __name__ == "__main__":
    main()
