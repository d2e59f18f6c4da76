"""Every client has a few shards of the label-sorted examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from fedsim.errors import FedsimError
from fedsim.partitions.base import Examples, Indices, Partition
from fedsim.registry import register
from fedsim.settings import Doc, Ge

__all__ = ["Shards"]


@register("partition", "shards")
@dataclass(frozen=True)
class Shards(Partition):
    """Examples sorted by label, cut into equal shards, ``shards`` of them dealt to each client.

    A client has about ``shards`` classes at most. Where the examples do not divide evenly, the
    first shards have one more.

    Source: McMahan et al., Communication-Efficient Learning of Deep Networks from
    Decentralized Data, 2017 (the pathological non-IID partition of MNIST).

    Parameters
    ----------
    clients : int
        ``clients * shards`` is at most the number of examples.
    seed : int
        Of who has which shards; the shards themselves do not depend on it.
    """

    shards: Annotated[
        int, Ge(1), Doc("How many each client has: 2 with McMahan et al., 5 with Das et al.")
    ] = 2
    clients: int = 100
    seed: int = 0

    @property
    def _kind(self) -> str:
        return f"shards ({self.shards} a client)"

    def deal(self, examples: Examples, generator: np.random.Generator) -> Sequence[Indices]:
        """Shards of examples sorted by label."""
        labels = examples.labels
        total = self.clients * self.shards
        if total > len(labels):
            raise FedsimError(
                f"partition.clients = {self.clients} with partition.shards = {self.shards} need "
                f"{total} shards, but there are only {len(labels)} training examples; their "
                f"product must be at most {len(labels)}."
            )
        shards = np.array_split(np.argsort(labels, kind="stable"), total)
        hands = generator.permutation(total).reshape(self.clients, self.shards)
        return [np.concatenate([shards[shard] for shard in hand]) for hand in hands]
