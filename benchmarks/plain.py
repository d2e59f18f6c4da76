"""DP-FedAvg as a plain PyTorch loop: one client after another, with `torch.optim`."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.jobs import BATCH, LR, SEED, Job
from fedsim.cohorts import Cohort
from fedsim.randomness import Draws, Randomness
from fedsim.training import ClientData


def plain_rounds(
    job: Job,
    data: ClientData,
    cohort: Cohort,
    rounds: int,
    *,
    clip_norm: float,
    noise_multiplier: float,
    dtype: torch.dtype = torch.float32,
) -> Iterator[Tensor]:
    """Parameters ``[d]`` after each round of clip, sum, noise, divide."""
    randomness = Randomness(SEED)
    draws = Draws(randomness, level="client", amplified=noise_multiplier > 0)
    model = job.model(dtype)
    weights = [p.detach().clone() for p in model.parameters()]
    local = copy.deepcopy(model)
    for t in range(1, rounds + 1):
        total = torch.zeros(sum(w.numel() for w in weights), dtype=torch.float64)
        for client in cohort.draw(t, draws):
            update = _update(local, weights, data, int(client), t, randomness)
            norm = float(torch.linalg.vector_norm(update, dtype=torch.float64))
            total += update.double() * min(1.0, clip_norm / max(norm, 1e-300))
        if noise_multiplier:
            noise = np.random.default_rng(t).standard_normal(len(total))
            total += torch.from_numpy(noise) * (noise_multiplier * clip_norm)
        mean = total / cohort.expected_size
        start = 0
        for w in weights:
            w += mean[start : start + w.numel()].view(w.shape).to(dtype)
            start += w.numel()
        yield torch.cat([w.reshape(-1) for w in weights])


def _update(
    model: torch.nn.Module,
    weights: list[Tensor],
    data: ClientData,
    client: int,
    t: int,
    randomness: Randomness,
) -> Tensor:
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    examples = data.indices[client]
    draws = Draws(randomness, level="example", amplified=False, client=client)
    order = examples[draws.generator(t).permutation(len(examples))]
    for start in range(0, len(examples), BATCH):
        batch = torch.from_numpy(order[start : start + BATCH])
        optimizer.zero_grad()
        F.cross_entropy(model(data.x[batch]), data.y[batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        return torch.cat(
            [(p - w).reshape(-1) for p, w in zip(model.parameters(), weights, strict=True)]
        )
