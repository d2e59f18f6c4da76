"""What every partitioner is, and the pieces they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsim.errors import FedsimError
from fedsim.randomness import Purpose, Randomness

__all__ = ["Indices", "Partition", "subsample"]

Indices = npt.NDArray[np.int64]

_SUBSAMPLE = 1  # the part of Purpose.PARTITION that the partitioners' own draws do not use


class Partition(ABC):
    """Deals training examples to clients.

    Subclasses are frozen dataclasses with the fields ``clients`` (how many there are) and
    ``seed`` (of every draw).
    """

    clients: int
    seed: int

    def indices(self, labels: npt.ArrayLike) -> list[Indices]:
        """Each client's examples.

        Parameters
        ----------
        labels : int ``[N]``
            Labels of the training examples, 0 or above.

        Returns
        -------
        list of int64 ``[n_c]``
            Sorted positions for client 0, 1, ...: disjoint, and together 0 .. N - 1.

        Raises
        ------
        FedsimError
            If the labels are no labels, or cannot be dealt in this way.
        """
        generator = Randomness(self.seed).generator(Purpose.PARTITION, level="run")
        return [np.sort(indices) for indices in self._deal(_checked(labels), generator)]

    @property
    def title(self) -> str:
        """Name, parameters and number of clients, for a heading."""
        return f"{self._kind}, {self.clients:,} client{'s' * (self.clients != 1)}"

    @property
    @abstractmethod
    def _kind(self) -> str:
        """Name and parameters."""

    @abstractmethod
    def _deal(self, labels: Indices, generator: np.random.Generator) -> Sequence[Indices]:
        """Positions of each client, in any order; ``labels [N]`` are not empty."""


def subsample(parts: Sequence[Indices], at_most: int, *, seed: int) -> list[Indices]:
    """Keep ``at_most`` examples of each client, drawn uniformly without replacement.

    A client's draw depends on the seed, its id and its own examples only. For a smaller
    version of a job: five clients of 500 images, say.
    """
    if at_most < 1:
        raise FedsimError(
            f"the examples kept of each client are {at_most}; they must be at least 1."
        )
    randomness = Randomness(seed)

    def keep(client: int, indices: Indices) -> Indices:
        if len(indices) <= at_most:
            return indices
        generator = randomness.generator(
            Purpose.PARTITION, level="run", client=client, part=_SUBSAMPLE
        )
        return np.sort(generator.choice(indices, size=at_most, replace=False))

    return [keep(client, indices) for client, indices in enumerate(parts)]


def require_clients(clients: int, at_least: int = 1, why: str = "") -> None:
    """Refuse a number of clients below ``at_least``."""
    if clients < at_least:
        raise FedsimError(f"partition.clients is {clients}; it must be at least {at_least}{why}.")


def require_enough(clients: int, examples: int) -> None:
    """Refuse more clients than examples, where each client is to have one."""
    if clients > examples:
        raise FedsimError(
            f"partition.clients is {clients}, but there are only {examples} training examples; "
            f"it must be at most {examples}, so that every client has one."
        )


def by_class(labels: Indices) -> list[Indices]:
    """Positions of each class 0 .. max, in increasing order; a class may have none."""
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.cumsum(np.bincount(labels))[:-1])


def _checked(labels: npt.ArrayLike) -> Indices:
    array: npt.NDArray[Any] = np.asarray(labels)
    if array.ndim != 1 or not array.size or not np.issubdtype(array.dtype, np.integer):
        raise FedsimError(
            f"the labels to partition have shape {array.shape} and dtype {array.dtype}; they must "
            "be integers [N] with N at least 1."
        )
    if int(array.min()) < 0:
        raise FedsimError(f"the label {int(array.min())} is negative; labels must be 0 or above.")
    return array.astype(np.int64)
