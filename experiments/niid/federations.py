"""The network of NIID-Bench, and its clients of two classes each (Li et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from fedsim.partitions import Examples, Indices, Partition

__all__ = ["NiidNetwork", "TwoClasses"]


class NiidNetwork(nn.Module):
    """Two 5x5 convolutions of 6 and 16 channels with max-pooling, then 120, 84, classes.

    Parameters
    ----------
    input_shape : sequence of int
        ``(channels, 28, 28)``.
    """

    def __init__(self, input_shape: Sequence[int], num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(input_shape[0], 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.pool, self.relu = nn.MaxPool2d(2), nn.ReLU()
        self.flatten = nn.Flatten()
        self.fc1 = nn.Linear(16 * 4 * 4, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[B, classes]``."""
        x = self.pool(self.relu(self.conv1(x)))
        x = self.flatten(self.pool(self.relu(self.conv2(x))))
        logits: Tensor = self.fc3(self.relu(self.fc2(self.relu(self.fc1(x)))))
        return logits


@dataclass(frozen=True)
class TwoClasses(Partition):
    """Client k has class k (modulo the classes) and one other; those who share a class split it."""

    clients: int = 10
    seed: int = 0

    def deal(self, examples: Examples, generator: np.random.Generator) -> list[Indices]:
        """Positions of each client's examples."""
        classes = int(examples.labels.max()) + 1
        first = np.arange(self.clients) % classes
        second = (first + generator.integers(1, classes, self.clients)) % classes
        dealt: list[list[Indices]] = [[] for _ in range(self.clients)]
        for label in range(classes):
            positions = generator.permutation(np.flatnonzero(examples.labels == label))
            owners = np.flatnonzero((first == label) | (second == label))
            for owner, part in zip(owners, np.array_split(positions, len(owners)), strict=True):
                dealt[owner].append(part)
        return [np.concatenate(parts) for parts in dealt]
