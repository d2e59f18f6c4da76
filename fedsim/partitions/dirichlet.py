"""Every class is split among the clients in Dirichlet-distributed proportions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from fedsim.partitions.base import Examples, Indices, Partition, by_class
from fedsim.registry import register
from fedsim.settings import Between, Doc, Gt

__all__ = ["Dirichlet"]


@register("partition", "dirichlet")
@dataclass(frozen=True)
class Dirichlet(Partition):
    """Each class dealt to the clients in proportions drawn from Dirichlet(alpha, ..., alpha).

    Both the mix of classes and the size differ between clients; a client may have nothing
    (often, when ``alpha`` is small or clients are many). Large ``alpha`` comes near to IID.

    Source: Yurochkin et al., Bayesian Nonparametric Federated Learning of Neural Networks,
    2019.

    Parameters
    ----------
    clients : int
    seed : int
    """

    alpha: Annotated[
        float,
        Gt(0),
        Between(1e-6, 1e6),
        Doc("Concentration: small for clients of few classes, large for clients that are alike."),
    ] = 0.5
    clients: int = 100
    seed: int = 0

    @property
    def _kind(self) -> str:
        return f"Dirichlet (alpha = {self.alpha:g})"

    def deal(self, examples: Examples, generator: np.random.Generator) -> Sequence[Indices]:
        """Each class in proportions of its own."""
        labels = examples.labels
        owner = np.empty(len(labels), dtype=np.int64)
        for positions in by_class(labels):
            shares = generator.dirichlet(np.full(self.clients, self.alpha))
            # Rounding the cumulated shares hands out every example, and each client's number
            # is within one of its share.
            stops = np.rint(np.cumsum(shares) * len(positions)).astype(np.int64)
            stops[-1] = len(positions)
            sizes = np.diff(np.minimum(stops, len(positions)), prepend=0)
            owner[generator.permutation(positions)] = np.repeat(np.arange(self.clients), sizes)
        return np.split(
            np.argsort(owner, kind="stable"),
            np.cumsum(np.bincount(owner, minlength=self.clients))[:-1],
        )
