"""Users of one size, each with a mix of classes of its own: pfl-research's CIFAR-10 users."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from fedsim.partitions import Partition
from fedsim.settings import Gt


@dataclass(frozen=True)
class Mixes(Partition):
    """Each user draws its mix from Dirichlet(alpha), and then examples not yet assigned."""

    clients: int = 100
    seed: int = 0
    alpha: Annotated[float, Gt(0)] = 0.1
    """Small for users of few classes."""

    def deal(self, examples, generator: np.random.Generator) -> Sequence[np.ndarray]:
        left = [
            generator.permutation(np.flatnonzero(examples.labels == label)).tolist()
            for label in np.unique(examples.labels)
        ]
        dealt: list[np.ndarray] = []
        for _ in range(self.clients):
            mix = generator.dirichlet(np.full(len(left), self.alpha))
            taken: list[int] = []
            while len(taken) < len(examples.labels) // self.clients:
                there = mix * [len(pool) > 0 for pool in left] + 1e-12 * np.array(
                    [len(pool) > 0 for pool in left]
                )
                taken.append(left[generator.choice(len(left), p=there / there.sum())].pop())
            dealt.append(np.sort(np.array(taken, dtype=np.int64)))
        return dealt
