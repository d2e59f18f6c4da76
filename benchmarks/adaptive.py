"""CPU time of `AdadpLR` per gradient, compared with `SGD`, on the MLP job in blocks."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

import numpy as np

from benchmarks.jobs import BATCH, EXAMPLES, JOBS, LR, data_of, trainer_of
from benchmarks.turns import in_turns, ratio
from fedsim.clients import SGD, AdadpLR
from fedsim.training import Trainer


def compare_adaptive(clients: int = 25, pairs: int = 15) -> dict[str, Any]:
    """CPU milliseconds per gradient evaluation of each, and their ratio."""
    data = data_of(clients)
    sides = {
        name: partial(_round, trainer_of(JOBS["mlp"], data, algorithm=algorithm), clients)
        for name, algorithm in (
            ("sgd ms", SGD(lr=LR)),
            ("adadp ms", AdadpLR(lr=LR, keep="half", eta_max=10 * LR)),
        )
    }
    seconds = {name: turns[1:] for name, turns in in_turns(sides, pairs + 1).items()}
    gradients = clients * EXAMPLES // BATCH
    return {
        **{name: median(turns) / gradients * 1e3 for name, turns in seconds.items()},
        "ratio": ratio(seconds["adadp ms"], seconds["sgd ms"]),
    }


def _round(trainer: Trainer, clients: int, t: int) -> None:
    for _ in trainer.train(trainer.initial(), np.arange(clients), t):
        pass
