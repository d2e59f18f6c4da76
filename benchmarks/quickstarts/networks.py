"""The networks of the two quick starts, with layers of the same sizes in the same order."""

from __future__ import annotations

from torch import nn


def mnist() -> nn.Sequential:
    """PFLlib's CNN for 28x28 grey images: 582,026 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10),
    )  # fmt: skip


def cifar() -> nn.Sequential:
    """Flower's CNN for 32x32 colour images: 62,006 parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(),
        nn.Linear(84, 10),
    )  # fmt: skip
