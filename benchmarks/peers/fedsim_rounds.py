"""A job of `benchmarks.peers` as a fedsim config, run by `fedsim.run`."""

from __future__ import annotations

import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import fedsim
from benchmarks.peers.tasks import COHORT_OF_NOISE, MULTIPLIER, Job, Rounds
from fedsim.engines import tensors
from fedsim.runs.callbacks import Callback, RunStatus


class Clock(Callback):
    """Ends each round on the clock, and the run when its time is up."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    def on_round(self, status: RunStatus) -> bool:
        """Whether the time is up."""
        return self._rounds.end()


def config(job: Job) -> fedsim.RunConfig:
    """The job's config; a private one draws its cohorts as its accounting assumes."""
    task = job.described
    settings: dict[str, Any] = {
        "seed": 1,
        "rounds": job.rounds,
        "data": {"name": job.data},
        "partition": {"name": "by-owner", "clients": task.clients},
        "client": {"lr": task.lr, "batch-size": task.batch, "epochs": 1},
        "cohort": {"name": "fixed", "size": task.cohort},
        "mechanism": {"name": "none", "weighting": "uniform"},
        "evaluate": {"every": 0},
        "engine": {"device": job.device, "workers": job.workers if job.device == "cpu" else 1},
    }
    if task.cohort == task.clients:
        del settings["cohort"]
    if task.clip_norm:
        settings |= {
            "cohort": {"name": "poisson", "rate": task.cohort / task.clients},
            "mechanism": {"name": "clipping", "clip-norm": task.clip_norm},
            "noise": {
                "multiplier": MULTIPLIER,
                "cohort-size": COHORT_OF_NOISE,
                "cohort-population": 1_000_000,
                "delta": 1e-6,
            },
        }
    return fedsim.RunConfig.parse(settings)


def main() -> None:
    job = Job.asked()
    settings, model = config(job), job.described.network()
    rounds = Rounds(job)
    with tempfile.TemporaryDirectory() as out:
        result = fedsim.run(settings, model=model, out=Path(out) / "run", callbacks=Clock(rounds))
    trained = job.described.network()
    # What is missing is frozen, and as it was made.
    assert not trained.load_state_dict(tensors(result.arrays), strict=False).unexpected_keys
    rounds.report(trained, f"fedsim {fedsim.__version__}, flwr {version('flwr')}")


if __name__ == "__main__":
    main()
