"""How many examples of each class each client has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedsim.partitions.base import Indices

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def class_counts(labels: Indices, parts: Sequence[Indices], num_classes: int) -> Counts:
    """Count the examples of each class that each client has, int64 ``[n, num_classes]``."""
    owner = np.repeat(np.arange(len(parts)), [len(indices) for indices in parts])
    cell = owner * num_classes + labels[np.concatenate(parts)]
    counts = np.bincount(cell, minlength=len(parts) * num_classes)
    return counts.reshape(len(parts), num_classes).astype(np.int64)


def class_shares(counts: Counts) -> Floats:
    """Each client's fraction of every class ``[n, K]``; zeros for an empty client."""
    shares: Floats = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    return shares


def by_largest_class(counts: Counts) -> Indices:
    """Clients in order of their largest class, the purest first; empty ones last."""
    n, num_classes = counts.shape
    # Among equal counts a client takes one by its id, so that ties favour no class.
    turn = (np.arange(n)[:, None] - np.arange(num_classes)) % num_classes
    largest = (counts * num_classes + turn).argmax(1)
    largest[counts.sum(1) == 0] = num_classes
    order: Indices = np.lexsort((-class_shares(counts).max(1), largest))
    return order
