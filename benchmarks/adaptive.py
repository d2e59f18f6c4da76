"""What `AdadpLR` costs beside `SGD`, a gradient, on the MLP job in blocks."""

from __future__ import annotations

import time

import numpy as np

from benchmarks.jobs import JOBS, LR, data_of, trainer_of
from fedsim.clients import SGD, AdadpLR

__all__ = ["compare_adaptive"]


def compare_adaptive(clients: int = 25, repeats: int = 8) -> dict[str, float]:
    """CPU milliseconds a gradient evaluation of each, and their ratio; the best of a few."""
    data, ids = data_of(clients), np.arange(clients)
    trainers = {
        "sgd ms": trainer_of(JOBS["mlp"], data, algorithm=SGD(lr=LR)),
        "adadp ms": trainer_of(JOBS["mlp"], data, algorithm=AdadpLR(lr=LR)),
    }
    best = dict.fromkeys(trainers, float("inf"))
    for t in range(1, repeats + 1):
        for name, trainer in trainers.items():
            vector = trainer.initial()
            began = time.process_time()
            for _ in trainer.train(vector, ids, t):
                pass
            if t > 1:
                milliseconds = (time.process_time() - began) / (clients * 6) * 1e3
                best[name] = min(best[name], milliseconds)
    return best | {"ratio": best["adadp ms"] / best["sgd ms"]}
