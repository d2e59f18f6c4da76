"""Clients of few classes, mixed with uniform randomness to a chosen degree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from fedsim.errors import FedsimError
from fedsim.partitions.base import Examples, Indices, Partition, require_clients
from fedsim.registry import register
from fedsim.settings import Doc, Ge, Le, Text, check_settings

__all__ = ["CIFAR10_PAIRS", "Groups", "InterpolatedPathological", "parse_groups"]

Groups = tuple[tuple[int, ...], ...]

CIFAR10_PAIRS: Groups = ((1, 9), (0, 8), (3, 5), (2, 6), (4, 7))
"""Automobile and truck; airplane and ship; cat and dog; bird and frog; deer and horse."""


@register("partition", "interpolated-pathological")
@dataclass(frozen=True)
class InterpolatedPathological(Partition):
    """Each group of clients owns some classes; a fraction ``randomness`` is then exchanged.

    First the examples of a group's classes are shuffled together and dealt to the group's
    clients evenly: sizes within a group differ by at most one, while how many of each class a
    client gets is left to chance. Then each client gives
    ``round(randomness * size)`` of its examples, drawn uniformly without replacement, to a
    common pool, which is shuffled and dealt back: every client keeps its size. With ``g``
    groups of equal size, the expected fraction of a client's own classes is
    ``1 - randomness + randomness / g``. Randomness 0 is pathological, 1 uniform.

    Source: Koskela and Honkela, arXiv 1809.03832 (five clients on CIFAR-10).

    Parameters
    ----------
    clients : int
        At least one a group; 0 for exactly one. Consecutive clients share a group; where they
        do not divide evenly, the first groups have one more.
    seed : int
    """

    randomness: Annotated[
        float, Ge(0), Le(1), Doc("rho: 0 for clients of their group's classes only, 1 for uniform.")
    ] = 0.0
    groups: Annotated[
        Groups,
        Text(lambda value: parse_groups(value), lambda groups: write_groups(groups)),
        Doc("The classes of each group, such as '1,9;0,8'; every class that occurs is in one."),
    ] = CIFAR10_PAIRS
    clients: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_settings(self, "partition.")
        _check(self.groups)
        object.__setattr__(self, "clients", self.clients or len(self.groups))
        super().__post_init__()
        require_clients(self.clients, len(self.groups), ", one for each of partition.groups")

    @property
    def _kind(self) -> str:
        return f"interpolated pathological (randomness = {self.randomness:g})"

    def deal(self, examples: Examples, generator: np.random.Generator) -> Sequence[Indices]:
        """Classes by group, of which a fraction is exchanged."""
        labels = examples.labels
        by_class = self._pathological(labels, generator)
        given_up = [
            np.sort(
                generator.choice(len(indices), round(self.randomness * len(indices)), replace=False)
            )
            for indices in by_class
        ]
        pool = generator.permutation(
            np.concatenate(
                [indices[give] for indices, give in zip(by_class, given_up, strict=True)]
            )
        )
        dealt = np.split(pool, np.cumsum([len(give) for give in given_up])[:-1])
        return [
            np.concatenate([np.delete(indices, give), back])
            for indices, give, back in zip(by_class, given_up, dealt, strict=True)
        ]

    def _pathological(self, labels: Indices, generator: np.random.Generator) -> list[Indices]:
        """Examples of each client's own classes only."""
        group_of = np.full(1 + max(int(labels.max()), *map(max, self.groups)), -1)
        for group, classes in enumerate(self.groups):
            group_of[list(classes)] = group
        groups = group_of[labels]
        if (groups < 0).any():
            homeless = np.unique(labels[groups < 0])
            raise FedsimError(
                f"partition.groups have no place for the class{'es' * (len(homeless) > 1)} "
                f"{', '.join(map(str, homeless))}; every class of the data must stand in one."
            )
        parts: list[Indices] = []
        for group, members in enumerate(np.array_split(np.arange(self.clients), len(self.groups))):
            positions = generator.permutation(np.flatnonzero(groups == group))
            if len(positions) < len(members):
                raise FedsimError(
                    f"the group {','.join(map(str, self.groups[group]))} of partition.groups has "
                    f"{len(positions)} training examples for {len(members)} clients; there must "
                    "be at least one for each."
                )
            parts += np.array_split(positions, len(members))
        return parts


def write_groups(groups: Groups) -> str:
    """As `parse_groups` reads them."""
    return ";".join(",".join(map(str, classes)) for classes in groups)


def parse_groups(text: str | Sequence[Sequence[int]]) -> Groups:
    """Groups of classes from a string or from lists: ``"1,9;0,8"`` is ``((1, 9), (0, 8))``.

    Raises
    ------
    FedsimError
        If it is not lists of classes (0 or above) with commas, separated by semicolons.
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
    twice = {label for label in classes if classes.count(label) > 1}
    if twice:
        raise FedsimError(
            f"partition.groups name the class {min(twice)} twice; a class stands in one group."
        )
