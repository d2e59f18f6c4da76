"""Partitions of the literature: uniform, and with skewed class distributions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from fedsim.arguments import check_arguments
from fedsim.array_types import Ints
from fedsim.errors import FedsimError
from fedsim.partitions.base import Examples, Partition, by_class, require_clients, require_enough
from fedsim.registry import register
from fedsim.settings import Ge, Interval, Le, Text, check_settings


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

    def deal(self, examples: Examples, generator: np.random.Generator) -> Sequence[Ints]:
        """Positions of each client's examples: equal shares of a random permutation."""
        require_enough(self.clients, len(examples))
        return np.array_split(generator.permutation(len(examples)), self.clients)


@register("partition", "dirichlet")
@dataclass(frozen=True)
class Dirichlet(Partition):
    """Each class dealt to the clients in proportions drawn from Dirichlet(alpha, ..., alpha).

    Both the class distribution and the number of examples differ between clients; a client may
    have no examples (often, if ``alpha`` is small or there are many clients). Large ``alpha``
    approaches IID.

    Source: Yurochkin et al., Bayesian Nonparametric Federated Learning of Neural Networks,
    2019.

    Parameters
    ----------
    clients : int
    seed : int
    """

    title_format: ClassVar[str] = "Dirichlet (alpha = {0.alpha:g})"
    alpha: Annotated[float, Interval(ge=1e-6, le=1e6)] = 0.5
    """The concentration parameter: small for clients with few classes, large for similar
    clients."""
    clients: int = 100
    seed: int = 0

    def deal(self, examples: Examples, generator: np.random.Generator) -> Sequence[Ints]:
        """Positions of each client's examples: each class in its own drawn proportions."""
        labels = examples.labels
        owner = np.empty(len(labels), dtype=np.int64)
        for positions in by_class(labels):
            shares = generator.dirichlet(np.full(self.clients, self.alpha))
            # Rounding the cumulative shares assigns every example exactly once, and each client's
            # count is within one of its share.
            stops = np.rint(np.cumsum(shares) * len(positions)).astype(np.int64)
            stops[-1] = len(positions)
            sizes = np.diff(np.minimum(stops, len(positions)), prepend=0)
            owner[generator.permutation(positions)] = np.repeat(np.arange(self.clients), sizes)
        return np.split(
            np.argsort(owner, kind="stable"),
            np.cumsum(np.bincount(owner, minlength=self.clients))[:-1],
        )


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
        Seed for dealing the shards to clients; the shards themselves do not depend on it.
    """

    title_format: ClassVar[str] = "shards ({0.shards} a client)"
    shards: Annotated[int, Ge(1)] = 2
    """The number of shards of each client: 2 in McMahan et al., 5 in Das et al."""
    clients: int = 100
    seed: int = 0

    def deal(self, examples: Examples, generator: np.random.Generator) -> Sequence[Ints]:
        """Positions of each client's examples: random shards of the examples sorted by label."""
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


Groups = tuple[tuple[int, ...], ...]

CIFAR10_PAIRS: Groups = ((1, 9), (0, 8), (3, 5), (2, 6), (4, 7))
"""Automobile and truck; airplane and ship; cat and dog; bird and frog; deer and horse."""


@register("partition", "interpolated-pathological")
@dataclass(frozen=True)
class InterpolatedPathological(Partition):
    """Each group of clients owns some classes; a fraction ``randomness`` is then exchanged.

    First the examples of a group's classes are shuffled together and dealt evenly to the group's
    clients: sizes within a group differ by at most one, and the count of each class is random.
    Then each client gives ``round(randomness * size)`` of its examples, drawn uniformly without
    replacement, to a common pool, which is shuffled and dealt back, so that every client keeps
    its size. With ``g`` groups of equal size, the expected fraction of a client's own classes is
    ``1 - randomness + randomness / g``. Randomness 0 is pathological, 1 uniform.

    Source: Koskela and Honkela, arXiv 1809.03832 (five clients on CIFAR-10).

    Parameters
    ----------
    clients : int
        At least one per group; 0 for exactly one. Consecutive clients share a group; if they do
        not divide evenly, the first groups have one more.
    seed : int
    """

    title_format: ClassVar[str] = "interpolated pathological (randomness = {0.randomness:g})"
    randomness: Annotated[float, Ge(0), Le(1)] = 0.0
    """rho: 0 for clients with their group's classes only, 1 for uniform."""
    groups: Annotated[
        Groups, Text(lambda value: parse_groups(value), lambda groups: write_groups(groups))
    ] = CIFAR10_PAIRS
    """The classes of each group, such as '1,9;0,8'; every class that occurs is in one."""
    clients: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_settings(self, "partition.")
        _check(self.groups)
        object.__setattr__(self, "clients", self.clients or len(self.groups))
        super().__post_init__()
        require_clients(self.clients, len(self.groups), ", one for each of partition.groups")

    def deal(self, examples: Examples, generator: np.random.Generator) -> Sequence[Ints]:
        """Positions of each client's examples: its group's classes, a fraction exchanged."""
        labels = examples.labels
        by_client = self._pathological(labels, generator)
        # Places within each client's own array, not positions in the data set.
        exchanged = [
            np.sort(
                generator.choice(len(indices), round(self.randomness * len(indices)), replace=False)
            )
            for indices in by_client
        ]
        pool = generator.permutation(
            np.concatenate(
                [indices[places] for indices, places in zip(by_client, exchanged, strict=True)]
            )
        )
        received_parts = np.split(pool, np.cumsum([len(places) for places in exchanged])[:-1])
        return [
            np.concatenate([np.delete(indices, places), received])
            for indices, places, received in zip(by_client, exchanged, received_parts, strict=True)
        ]

    def _pathological(self, labels: Ints, generator: np.random.Generator) -> list[Ints]:
        """Positions of each client's examples before the exchange, all of its group's classes."""
        group_of = np.full(1 + max(int(labels.max()), *map(max, self.groups)), -1)
        for group, classes in enumerate(self.groups):
            group_of[list(classes)] = group
        groups = group_of[labels]
        if (groups < 0).any():
            ungrouped = np.unique(labels[groups < 0])
            raise FedsimError(
                f"partition.groups lack the class{'es' * (len(ungrouped) > 1)} "
                f"{', '.join(map(str, ungrouped))}; every class of the data must be in one."
            )
        by_client: list[Ints] = []
        for group, members in enumerate(np.array_split(np.arange(self.clients), len(self.groups))):
            positions = generator.permutation(np.flatnonzero(groups == group))
            if len(positions) < len(members):
                raise FedsimError(
                    f"the group {','.join(map(str, self.groups[group]))} of partition.groups has "
                    f"{len(positions)} training examples for {len(members)} clients; there must "
                    "be at least one for each."
                )
            by_client += np.array_split(positions, len(members))
        return by_client


def write_groups(groups: Groups) -> str:
    """Write groups in the form that `parse_groups` reads."""
    return ";".join(",".join(map(str, classes)) for classes in groups)


@check_arguments
def parse_groups(text: str | Sequence[Sequence[int]]) -> Groups:
    """Parse groups of classes from a string or lists: ``"1,9;0,8"`` is ``((1, 9), (0, 8))``.

    Raises
    ------
    FedsimError
        If it is not a semicolon-separated list of groups, each classes (0 or above) with commas.
    """
    try:
        if not isinstance(text, str):
            text = write_groups(tuple(tuple(classes) for classes in text))
        groups = tuple(
            tuple(int(label) for label in group.split(",")) for group in text.strip("; ").split(";")
        )
    except (ValueError, TypeError):
        raise FedsimError(
            f"partition.groups is '{text}'; it must be classes separated by commas, groups by "
            "semicolons, such as '1,9;0,8;3,5;2,6;4,7'."
        ) from None
    _check(groups)
    return groups


def _check(groups: Groups) -> None:
    classes = [label for group in groups for label in group]
    if not all(groups) or not groups or any(label < 0 for label in classes):
        raise FedsimError(
            f"partition.groups is {groups}; every group must have a class, and a class is 0 or "
            "above."
        )
    twice = [label for label, times in Counter(classes).items() if times > 1]
    if twice:
        raise FedsimError(
            f"partition.groups name the class {min(twice)} twice; each must be in one group."
        )
