"""Measure the peak memory of one round, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def measured_peak(job: str, cohort: int) -> float:
    """MiB of peak memory that a round with ``cohort`` of 10,000 clients adds.

    A cohort of 0 stands for two whole blocks: one is summed while the next one is trained.
    """
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", job, str(cohort)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0"},
    )
    return float(run.stdout.split()[-1])


def peak(name: str, cohort: int) -> float:
    """As `measured_peak`, but in this process; call it once per process."""
    from benchmarks.jobs import JOBS, data_of, make_trainer
    from fedsim.cohorts import FixedCohort
    from fedsim.federation.engines.process import use_one_thread
    from fedsim.mechanisms import Clipping, NoiseSource, Releaser
    from fedsim.privacy import Independent
    from fedsim.privacy.plan import ReleasePlan
    from fedsim.randomness import Draws, Purpose, Randomness
    from fedsim.rows import DenseRows

    use_one_thread()
    trainer = make_trainer(JOBS[name], data_of(10_000, distinct=1000))
    vector, randomness = trainer.initial(), Randomness(2)
    draws = Draws(randomness, level="client", amplified=True)

    def one_round(size: int, t: int) -> None:
        cohort = FixedCohort(size, 10_000)
        ids = cohort.draw(t, draws)
        plan = ReleasePlan(
            level="client", sampler=cohort, mechanism=Clipping(1.0), noise=Independent(1.0)
        )
        releaser = Releaser(plan, trainer.layout)
        total = releaser.start({})
        for block in trainer.train(vector, ids, t):
            assert block.rows is not None
            total.add(DenseRows(block.rows))
        noise = NoiseSource(randomness.generator(Purpose.NOISE, level="client", round=t))
        releaser.release(total, noise)

    one_round(1, 1)  # allocates what is allocated once: imports, buffers, thread pools
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak (VmHWM)
    one_round(cohort or 2 * trainer.block_size, 2)
    return resident("VmHWM") - before


def resident(field: str) -> float:
    """Value of a field of /proc/self/status (Linux), in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}; memory is measured on Linux only.")


if __name__ == "__main__":
    print(peak(sys.argv[1], int(sys.argv[2])))
