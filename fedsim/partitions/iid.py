"""Every client has a uniformly drawn share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedsim.partitions.base import Examples, Indices, Partition, require_enough
from fedsim.registry import register

__all__ = ["IID"]


@register("partition", "iid")
@dataclass(frozen=True)
class IID(Partition):
    """Examples shuffled and dealt evenly: sizes differ by one at most.

    Parameters
    ----------
    clients : int
        At most the number of examples.
    seed : int

    Examples
    --------
    >>> [len(examples) for examples in IID(clients=3, seed=1).indices([0, 1] * 5)]
    [4, 3, 3]
    """

    clients: int = 100
    seed: int = 0

    @property
    def _kind(self) -> str:
        return "IID"

    def deal(self, examples: Examples, generator: np.random.Generator) -> Sequence[Indices]:
        """Equal shares of a shuffle."""
        require_enough(self.clients, len(examples))
        return np.array_split(generator.permutation(len(examples)), self.clients)
