"""Cyclic groups: each client belongs to one of b groups, which take part in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from fedsim.errors import FedsimError
from fedsim.privacy.laws.base import Law, Participation
from fedsim.privacy.laws.poisson import poisson_rdp
from fedsim.privacy.laws.sampler import Ids, RememberingSampler, declared_population
from fedsim.privacy.losses import Array, DominatingPair, SampledGaussian, gaussian_rdp
from fedsim.randomness import Draws
from fedsim.registry import register
from fedsim.settings import Doc, Ge, Gt, Le


@dataclass(frozen=True, kw_only=True)
class CyclicLaw(Law):
    """A row can be in one round out of ``groups``, and is in it with probability ``in_group``.

    Adding a row changes the group of no other row, since each group is drawn independently.
    """

    name: ClassVar[str] = "cyclic"
    flower: ClassVar[str] = "POISSON"
    groups: int = 1
    in_group: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.in_group <= 1 or self.groups < 1:
            raise FedsimError(
                f"groups is {self.groups} and the rate in a group {self.in_group}; they must be "
                "1 or more, and in (0, 1]."
            )

    @property
    def rounds(self) -> int:
        """The number of groups: each row can be in one of so many rounds."""
        return self.groups

    @property
    def rate(self) -> float:
        """Within the group: that a row's group is secret too amplifies nothing."""
        return self.in_group

    def pairs(self, noise_multiplier: float) -> tuple[DominatingPair, DominatingPair]:
        """Those of Poisson sampling in the group."""
        return SampledGaussian(self.in_group, noise_multiplier).both

    def rdp(self, noise_multiplier: float) -> Array:
        """That of Poisson sampling in the group."""
        if self.in_group == 1:
            return gaussian_rdp(1 / noise_multiplier)
        return poisson_rdp(self.in_group, noise_multiplier)

    def inclusion(self, population: int) -> None:
        """None: draws of several rounds are dependent, since groups stay."""

    @property
    def label(self) -> str:
        """A few words for a table."""
        return f"{self.groups} groups in turn, rate {self.in_group:.6g}"

    def sentence(self, row: str) -> str:
        """How a ``row`` is drawn, for a statement."""
        inside = "" if self.in_group == 1 else ", of which each is in independently (Poisson)"
        return f"groups of {row}s in turn, every {self.groups} rounds{inside}"

    def round_sentence(self, population: int) -> str:
        """Which clients take part in a round, for a report."""
        return (
            f"Clients belong to {self.groups} groups, which take turns; each client of the group "
            f"whose turn it is takes part with probability {self.in_group:g}: about "
            f"{self.in_group * population / self.groups:,.4g} of {population:,}."
        )


@register("cohort", "cyclic")
@dataclass(frozen=True)
class Cyclic(RememberingSampler):
    """Clients in randomly drawn groups; in round t, group t modulo their number takes part.

    A client that takes part is not in the next ``groups - 1`` rounds, which bounds the sensitivity
    of noise that is correlated over rounds.

    Guarantee: add-remove (each client's group is drawn independently, so that group sizes are
    random). In its group's round a client is in with probability ``rate``, with the amplification
    of Poisson sampling.

    Parameters
    ----------
    groups : int
    rate : float
        In (0, 1].
    population : int or None
        Declared public number.
    """

    name: ClassVar[str] = "cyclic"
    groups: Annotated[int, Ge(1), Doc("How many groups of clients take turns, by rounds.")] = 10
    rate: Annotated[
        float, Gt(0), Le(1.0), Doc("Of the group whose round it is, the share that takes part.")
    ] = 1.0
    population: int | None = None

    @property
    def expected_size(self) -> float:
        """``rate * population / groups``."""
        return self.rate * declared_population(self) / self.groups

    def draw(self, round: int, draws: Draws, step: int = 0) -> Ids:
        """Sorted ids."""
        if not self.memory:
            # One number a client, in the order of their ids: one client more moves no other.
            numbers = draws.generator(0, 0).random(declared_population(self))
            self.memory["groups"] = (numbers * self.groups).astype(np.int64)
        members = np.flatnonzero(self.memory["groups"] == (round - 1) % self.groups)
        if self.rate == 1:
            return members
        return members[draws.generator(round, step).random(len(members)) < self.rate]

    def law(self) -> CyclicLaw:
        """One round in ``groups``."""
        return CyclicLaw(groups=self.groups, in_group=self.rate, population=self.population)

    def participation(self, rounds: int) -> Participation:
        """Rounds that are a multiple of the number of groups apart."""
        return Participation(rounds, self.groups)
