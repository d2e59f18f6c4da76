"""Cyclic sampling: each client belongs to one of b groups, and the groups take turns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np

from fedsim.array_types import Floats, Ints
from fedsim.privacy.laws.base import Law, Participation
from fedsim.privacy.laws.poisson import poisson_rdp
from fedsim.privacy.laws.sampler import RememberingSampler, declared_population
from fedsim.privacy.losses import DominatingPair, SampledGaussian, gaussian_rdp
from fedsim.randomness import Draws
from fedsim.registry import register
from fedsim.settings import Ge, Gt, Le


@dataclass(frozen=True, kw_only=True)
class CyclicLaw(Law):
    """Law of a row in one round out of each ``groups``, included with probability ``in_group``.

    Every row's group is drawn independently, so that adding a row leaves all others in theirs.
    """

    name: ClassVar[str] = "cyclic"
    flower_method: ClassVar[str] = "POISSON"
    groups: Annotated[int, Ge(1)] = 1
    in_group: Annotated[float, Gt(0), Le(1)] = 1.0

    @property
    def rounds(self) -> int:
        """Number of groups: one event covers a cycle, in one round of which a row can be."""
        return self.groups

    @property
    def rate(self) -> float:
        """Sampling rate within the group; the secrecy of the group itself is not credited."""
        return self.in_group

    @property
    def known_sample_law(self) -> Law:
        """One Gaussian a cycle: a row is in the round of its group."""
        return replace(self, in_group=1.0, adjacency="zero-out")

    def expected_size(self, population: int) -> float:
        """``in_group * population / groups``."""
        return self.in_group * population / self.groups

    def pairs(self, noise_multiplier: float) -> tuple[DominatingPair, DominatingPair]:
        """Dominating pairs of Poisson sampling at the rate within the group."""
        return SampledGaussian(self.in_group, noise_multiplier).both_directions

    def rdp(self, noise_multiplier: float) -> Floats:
        """Rényi curve of Poisson sampling at the rate within the group."""
        if self.in_group == 1:
            return gaussian_rdp(1 / noise_multiplier)
        return poisson_rdp(self.in_group, noise_multiplier)

    def inclusion(self, population: int) -> None:
        """None: rounds are not drawn independently, since clients stay in their groups."""

    @property
    def label(self) -> str:
        """Short description, for tables."""
        return f"{self.groups} groups in turn, rate {self.in_group:.6g}"

    def sentence(self, row: str) -> str:
        """How a ``row`` is sampled: a phrase of the privacy statement."""
        within_group = "" if self.in_group == 1 else ", of which each is in independently (Poisson)"
        return f"groups of {row}s in turn, every {self.groups} rounds{within_group}"

    def round_sentence(self, population: int) -> str:
        """Which clients take part in a round: a sentence for reports."""
        return (
            f"Clients belong to {self.groups} groups, which take turns; each client of the group "
            f"whose turn it is takes part with probability {self.in_group:g}: about "
            f"{self.expected_size(population):,.4g} of {population:,}."
        )


@register("cohort", "cyclic")
@dataclass(frozen=True)
class Cyclic(RememberingSampler):
    """Random groups of clients take turns: in round t, group ``(t - 1) % groups`` takes part.

    A client that takes part is not in the next ``groups - 1`` rounds, which bounds the sensitivity
    of noise that is correlated over rounds.

    Guarantee: add-remove (each client's group is drawn independently, so that group sizes are
    random). In its group's round a client is sampled with probability ``rate``, with the
    amplification of Poisson sampling.

    Parameters
    ----------
    groups : int
        Number of groups.
    rate : float
        Sampling probability within the group whose turn it is, in (0, 1].
    population : int or None
        Number of clients: declared, public.
    """

    name: ClassVar[str] = "cyclic"
    groups: Annotated[int, Ge(1)] = 10
    """How many groups of clients take turns, by rounds."""
    rate: Annotated[float, Gt(0), Le(1.0)] = 1.0
    """The sampling rate within the group whose turn it is."""
    population: int | None = None

    @property
    def expected_size(self) -> float:
        """``rate * population / groups``."""
        return self.rate * declared_population(self) / self.groups

    def draw(self, round: int, draws: Draws, step: int = 0) -> Ints:
        """Sorted ids of the sampled members of this round's group."""
        if not self.memory:
            # Round 0 is the address of the groups. One number per client in the order of ids: one
            # more client, with the highest id, leaves all others in their groups.
            numbers = draws.generator(0, 0).random(declared_population(self))
            self.memory["groups"] = (numbers * self.groups).astype(np.int64)
        members = np.flatnonzero(self.memory["groups"] == (round - 1) % self.groups)
        if self.rate == 1:
            return members
        return members[draws.generator(round, step).random(len(members)) < self.rate]

    def law(self) -> CyclicLaw:
        """Law of one cycle of ``groups`` rounds."""
        return CyclicLaw(groups=self.groups, in_group=self.rate, population=self.population)

    def participation(self, rounds: int) -> Participation:
        """Every ``groups``-th round, from the group's first on."""
        return Participation(rounds, self.groups)
