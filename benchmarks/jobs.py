"""The two jobs of the benchmarks, on synthetic examples."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.clients import SGD, LocalAlgorithm
from fedsim.randomness import Randomness
from fedsim.training import ClientData, Trainer

FEATURES, CLASSES, EXAMPLES = 784, 10, 60
LR, BATCH, SEED = 0.1, 10, 1


@dataclass(frozen=True)
class Job:
    """A model, and the size of the cohort."""

    name: str
    widths: tuple[int, ...]
    cohort: int

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Sequential:
        generator = torch.Generator().manual_seed(SEED)
        sizes = (FEATURES, *self.widths, CLASSES)
        modules: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise(sizes):
            modules += [nn.Linear(inputs, outputs), nn.ReLU()]
        model = nn.Sequential(*modules[:-1]).to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(values * 0.05)
        return model


JOBS = {job.name: job for job in (Job("softmax", (), 100), Job("mlp", (256, 256), 50))}


def data_of(
    clients: int, dtype: torch.dtype = torch.float32, distinct: int | None = None
) -> ClientData:
    """Data of ``clients`` with 60 examples each; after ``distinct`` clients, examples repeat."""
    generator = torch.Generator().manual_seed(SEED)
    count = (distinct or clients) * EXAMPLES
    x = torch.rand(count, FEATURES, generator=generator).to(dtype)
    y: Tensor = torch.randint(CLASSES, (count,), generator=generator)
    order = np.random.default_rng(SEED).permutation(count).reshape(-1, EXAMPLES)
    return ClientData(x, y, [order[i % len(order)] for i in range(clients)])


def make_trainer(
    job: Job,
    data: ClientData,
    *,
    dtype: torch.dtype = torch.float32,
    algorithm: LocalAlgorithm | None = None,
    **settings: Any,
) -> Trainer:
    """The job's trainer: batch 10, one epoch."""
    return Trainer(
        job.model(dtype),
        algorithm or SGD(lr=LR),
        data,
        batch_size=BATCH,
        epochs=1,
        randomness=Randomness(SEED),
        **settings,
    )
