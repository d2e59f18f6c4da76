"""Small runs of every kind: all mechanisms, levels, placements and client algorithms."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from fedsim import RunConfig
from fedsim.datasets import Dataset
from fedsim.partitions import IID

BASE = ["rounds=2", "seed=3", "evaluate.every=0", "partition.clients=24", "data.train=:240"]
MLP = ["model.name=mlp", "model.widths=16"]
POISSON = ["cohort.name=poisson", "cohort.rate=0.5"]
FIXED = ["cohort.name=fixed", "cohort.size=9"]
CLIPPING = ["mechanism.name=clipping", "mechanism.clip-norm=0.5", "noise.multiplier=0.8"]
EXAMPLES = ["client.mechanism.name=clipping", "client.noise.multiplier=0.9"]
SHARES = ["noise.placement=client"]
BUFFERED = [
    "rounds=4", "client.steps=2", "cohort.name=buffered", "cohort.concurrency=8", "cohort.buffer=3",
    "cohort.participations=2", "devices.seconds-per-step=1", "devices.spread=1",
    "devices.dropout=0.1",
]  # fmt: skip

RUNS: dict[str, list[str]] = {
    "clipping, poisson": [*CLIPPING, *POISSON],
    "clipping, fixed, momentum, mlp": [*CLIPPING, *FIXED, *MLP, "client.momentum=0.9"],
    "clipping, shares, full": [*CLIPPING, *SHARES],
    "clipping, target epsilon, drawn plainly": [
        *CLIPPING[:2], *POISSON, "noise.target-epsilon=4.0", "noise.hardened=false",
    ],
    "normalisation, shares, poisson, server adam": [
        "mechanism.name=normalization", "noise.multiplier=0.5", *SHARES, *POISSON,
        "server.optimizer=adam", "server.lr=0.05",
    ],
    "coordinate clipping, devices": [
        "mechanism.name=coordinate-clipping", "noise.multiplier=0.5", "devices.availability=0.8",
        "devices.dropout=0.2",
    ],
    "quantile clipping, fixed, server momentum": [
        "mechanism.name=quantile-clipping", "noise.multiplier=0.5", *FIXED, "server.momentum=0.9",
    ],
    "clipping, poisson, average of the model, momentum": [
        *CLIPPING, *POISSON, "rounds=4", "server.optimizer=averaged", "server.decay=0.5",
        "server.momentum=0.5",
    ],
    "adaclip, poisson, adam clients": [
        "mechanism.name=adaclip", "noise.multiplier=0.5", *POISSON, "client.name=adam",
        "client.lr=0.01",
    ],
    "adaptive noise, full, adadp-noise clients": [
        "mechanism.name=adaptive-noise", "noise.multiplier=0.5", "client.name=adadp-noise",
        "mechanism.threshold=1e-4", *MLP,
    ],
    "per layer, scalar, mlp": [
        *CLIPPING, *MLP, "mechanism.per-layer=true", "mechanism.private-scalar=loss", *POISSON,
    ],
    "no privacy, weighted, fixed, rmsprop clients": [
        "mechanism.weighting=num-examples", *FIXED, "client.name=rmsprop", "partition.name=shards",
    ],
    "no privacy, adadp-lr clients with state": [
        "client.name=adadp-lr", "client.state=client", "client.epochs=3",
        "client.keep=half", "client.eta-max=1",
    ],
    "no privacy, scaffold": [
        "client.name=scaffold", "client.state=client", "mechanism.weighting=uniform", *MLP,
    ],
    "no privacy, fednova, work of their own": ["client.name=fednova", "client.work=whole(1,3)"],
    "no privacy, ditto": ["client.name=ditto", "client.state=client", "client.lr=0.1", *FIXED],
    "no privacy, proximal, func path, float64": [
        "client.proximal=0.1", "client.path=func", "model.dtype=float64", *MLP,
    ],
    "median": ["mechanism.name=median", *FIXED],
    "krum": ["mechanism.name=krum", "mechanism.byzantine=2"],
    "trimmed mean": ["mechanism.name=trimmed-mean"],
    "examples, poisson batches": [*EXAMPLES, *MLP, *POISSON],
    "examples, shuffled, momentum, plain path": [
        *EXAMPLES, "client.noise.sampling=shuffle", "client.momentum=0.5", "client.path=plain",
    ],
    "examples, normalised per layer, target epsilon": [
        "client.mechanism.name=normalization", "client.mechanism.per-layer=true",
        "client.noise.target-epsilon=8.0", *MLP,
    ],
    "examples, quantile clipping, adam": [
        "client.mechanism.name=quantile-clipping", "client.noise.multiplier=0.7",
        "client.name=adam", "client.lr=0.01", "client.steps=3",
    ],
    "both levels": [*CLIPPING, *POISSON, *EXAMPLES],
    "clipping, buffered, devices": [*CLIPPING, *BUFFERED],
    "no privacy, buffered, adadp-lr clients with state, server adam": [
        *BUFFERED, "mechanism.weighting=uniform", "client.name=adadp-lr", "client.state=client",
        "server.optimizer=adam", "server.lr=0.05",
    ],
    "normalised per layer, buffered, banded noise, examples": [
        "mechanism.name=normalization", "mechanism.per-layer=true", "noise.multiplier=0.5", *MLP,
        "noise.name=banded", *BUFFERED, "cohort.separation=2", *EXAMPLES,
    ],
}  # fmt: skip
ROBUST = ("median", "krum", "trimmed-mean")

IMAGES = {"images": CLIPPING, "images, examples": EXAMPLES}
"""Of `image_run`."""


def image_run(settings: list[str], device: str = "cpu") -> tuple[RunConfig, dict[str, Any]]:
    """A run of made-up images through convolutions, with its objects."""
    rng = np.random.default_rng(2)
    x, y = rng.integers(0, 256, (60, 8, 8), dtype=np.uint8), rng.integers(0, 4, 60)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 4)
    )
    data = Dataset.from_arrays("images", {"x": x, "y": y}, {"x": x[:8], "y": y[:8]}, classes=4)
    common = ["rounds=2", "seed=3", "evaluate.every=0", "partition.clients=6"]
    config = RunConfig.from_overrides([*common, f"engine.device={device}", *settings])
    return config, {"model": model, "data": data, "partition": IID(clients=6, seed=3)}


def run_of(name: str, device: str = "cpu", *others: str) -> tuple[RunConfig, dict[str, Any]]:
    """The config of a run, and its objects."""
    if name in IMAGES:
        return image_run([*IMAGES[name], *others], device)
    return RunConfig.from_overrides([*BASE, f"engine.device={device}", *RUNS[name], *others]), {}
