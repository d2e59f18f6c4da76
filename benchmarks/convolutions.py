"""`python -m benchmarks.convolutions`: ADADP's CIFAR-10 network on a CPU core.

Five clients, batch 10: CPU milliseconds a gradient step through the trainer, beside a plain
`torch.optim` loop with channels last. The two take turns, and the best of a few counts.
"""

from __future__ import annotations

import copy
import os
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console

from fedsim import models
from fedsim.clients import SGD, AdadpLR, ClientData, Trainer
from fedsim.process import settle
from fedsim.randomness import Purpose, Randomness

__all__ = ["main"]

CLIENTS, EXAMPLES, BATCH, LR = 5, 50, 10, 0.05
STEPS = CLIENTS * EXAMPLES // BATCH


def plain_round(model: torch.nn.Module, data: ClientData, t: int) -> None:
    for client, own in enumerate(data.indices):
        local = copy.deepcopy(model).to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(local.parameters(), lr=LR)
        order = own[Randomness(1).generator(Purpose.BATCH, t, client).permutation(len(own))]
        for start in range(0, len(order), BATCH):
            at = torch.from_numpy(order[start : start + BATCH])
            x = data.x[at].contiguous(memory_format=torch.channels_last)
            optimizer.zero_grad()
            F.cross_entropy(local(x), data.y[at]).backward()
            optimizer.step()


def main(repeats: int = 8) -> None:
    settle()
    model = models.build("adadp-cifar", (3, 32, 32), 10)
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(CLIENTS * EXAMPLES, 3, 32, 32, generator=generator)
    y = torch.randint(10, (len(x),), generator=generator)
    data = ClientData(x, y, list(np.arange(len(x)).reshape(CLIENTS, EXAMPLES)))
    ways = {"plain loop, channels last": lambda t: plain_round(model, data, t)}
    for algorithm in (SGD(lr=LR), AdadpLR(lr=LR)):
        trainer = Trainer(model, algorithm, data, batch_size=BATCH, randomness=Randomness(1))
        ways[type(algorithm).__name__] = lambda t, own=trainer: list(  # type: ignore[misc]
            own.train(own.initial(), np.arange(CLIENTS), t)
        )
    best = dict.fromkeys(ways, float("inf"))
    for t in range(repeats):
        for name, work in ways.items():
            began = time.process_time()
            work(t)
            best[name] = min(best[name], (time.process_time() - began) / STEPS * 1e3)
    for name, ms in best.items():
        Console().print(f"{name:28s} {ms:7.2f} ms a step")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
