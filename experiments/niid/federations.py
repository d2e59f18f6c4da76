"""The network of NIID-Bench and its ways to split examples among clients (Li et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor, nn

from fedsim.array_types import Ints
from fedsim.partitions import Examples, Partition
from fedsim.partitions.base import require_enough

FEWEST = 10
"""Least number of examples per client; a split with fewer is drawn again."""


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
class CappedDirichlet(Partition):
    """Classes dealt one after another, each by a Dirichlet draw among clients that are not full.

    A client is full once it has an equal share of all examples, so that sizes differ less than
    with `fedsim.partitions.Dirichlet`.

    Parameters
    ----------
    clients : int
        Number of clients; there must be at least `FEWEST` examples for each.
    """

    words: ClassVar[str] = "Dirichlet (alpha = {0.alpha:g}), capped"
    alpha: float = 0.5
    clients: int = 10
    seed: int = 0

    def deal(self, examples: Examples, generator: np.random.Generator) -> list[Ints]:
        """Positions of each client's examples."""
        labels = examples.labels
        require_enough(FEWEST * self.clients, len(labels))
        sizes = np.zeros(self.clients)
        while sizes.min() < FEWEST:
            dealt: list[list[Ints]] = [[] for _ in range(self.clients)]
            sizes = np.zeros(self.clients)
            for label in np.unique(labels):
                positions = generator.permutation(np.flatnonzero(labels == label))
                shares = generator.dirichlet(np.full(self.clients, self.alpha))
                shares[sizes >= len(labels) / self.clients] = 0.0
                stops = (np.cumsum(shares / shares.sum()) * len(positions)).astype(np.int64)[:-1]
                for client, part in enumerate(np.split(positions, stops)):
                    dealt[client].append(part)
                    sizes[client] += len(part)
        return [np.concatenate(parts) for parts in dealt]


@dataclass(frozen=True)
class TwoClasses(Partition):
    """Client k has class k (modulo the number of classes) and a random other one.

    The examples of a class are split evenly among the clients that have it.
    """

    clients: int = 10
    seed: int = 0

    def deal(self, examples: Examples, generator: np.random.Generator) -> list[Ints]:
        """Positions of each client's examples."""
        classes = int(examples.labels.max()) + 1
        first = np.arange(self.clients) % classes
        second = (first + generator.integers(1, classes, self.clients)) % classes
        dealt: list[list[Ints]] = [[] for _ in range(self.clients)]
        for label in range(classes):
            positions = generator.permutation(np.flatnonzero(examples.labels == label))
            owners = np.flatnonzero((first == label) | (second == label))
            for owner, part in zip(owners, np.array_split(positions, len(owners)), strict=True):
                dealt[owner].append(part)
        return [np.concatenate(parts) for parts in dealt]
