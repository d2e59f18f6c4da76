"""A trainer of a model that does, in each round, what a schedule says to the clients in it.

A schedule is ``FAULT:CLIENTS`` for each round, with commas between rounds and dots between clients.
"""

import os
import sys
import time

import numpy as np
import torch
from torch import nn

from fedsim.clients import SGD
from fedsim.randomness import Randomness
from fedsim.training import ClientData, Trainer

SIZES = (5, 9, 4, 12, 7, 6, 0)
"""Examples of each client; the last has none."""


def trainer_for(schedule: str, block_size: int = 0) -> Trainer:
    """Clients whose examples' first feature says whose they are."""
    draws = np.random.default_rng(0)
    x = draws.normal(size=(sum(SIZES), 6)).astype(np.float32)
    y = draws.integers(0, 3, sum(SIZES))
    parts = np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])
    for client, examples in enumerate(parts):
        x[examples, 0] = client
    data = ClientData(torch.from_numpy(x), torch.from_numpy(y), parts)
    return Treacherous(
        Net(schedule), SGD(lr=0.1), data,
        batch_size=4, path="plain", block_size=block_size, randomness=Randomness(3),
    )  # fmt: skip


class Treacherous(Trainer):
    """Tells its model which round it is."""

    def train(self, vector, client_ids, round):
        self.model.round = round
        yield from super().train(vector, client_ids, round)

    def fit(self, vector, client_ids, round):
        self.model.round = round
        return super().fit(vector, client_ids, round)

    def copy_for(self, device):
        """Itself: a copy would be a plain trainer, which tells its model nothing."""
        return self


class Net(nn.Module):
    """A linear model that fails where it is told to."""

    def __init__(self, schedule: str):
        super().__init__()
        self.round = 0
        self.schedule = [entry.partition(":")[::2] for entry in schedule.split(",")]
        self.linear = nn.Linear(5, 3)
        nn.init.constant_(self.linear.weight, 0.1)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x):
        outputs = self.linear(x[:, 1:])
        fault, clients = self.schedule[self.round - 1] if self.round else ("", "")
        if str(int(x[0, 0])) not in clients.split("."):
            return outputs
        if fault == "raises":
            raise ArithmeticError("out of luck")
        if fault == "exits":
            sys.exit(3)
        if fault == "dies":
            os._exit(9)
        if fault == "hangs":
            time.sleep(3600)
        if fault == "shape":
            return outputs[:-1]
        if fault == "width":
            return outputs[:, :0]
        return outputs * float(fault)
