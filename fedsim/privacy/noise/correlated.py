"""Noise that is correlated over rounds: what its families have in common.

T rounds release ``X + C^-1 Z`` for their sums X, a lower triangular matrix C with ones on its
diagonal and fresh draws Z: later noise takes part of the earlier away again, so that sums over
rounds, which a model is, carry less. In units of C the rounds are one Gaussian, ``C X + Z``, whose
sensitivity depends on the rounds that one row can be in (Denisov et al. 2022; Choquette-Choo et
al. 2023).
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Self

import numpy as np
import numpy.typing as npt

from fedsim.errors import FedsimError
from fedsim.privacy.laws.base import Law, Participation
from fedsim.privacy.laws.correlated import CorrelatedLaw
from fedsim.privacy.laws.full import FullLaw
from fedsim.privacy.noise.base import Noise
from fedsim.settings import Doc

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Correlated(Noise):
    """Base of noises whose rounds share draws; a family says what its matrix C is.

    Guarantee: all rounds of a plan together are one Gaussian whose multiplier is this one's over
    `sensitivity`; where rows are sampled within groups of rounds that C does not couple, one
    sampled Gaussian for each such group, whose multiplier is this one's over `column`.

    Raises
    ------
    FedsimError
        If the coefficients are not of this family.
    """

    name: ClassVar[str]
    """As in a config's ``noise.name``."""

    coefficients: Annotated[
        str,
        Doc(
            "What makes the noise of a round from draws of this and earlier rounds; empty to find "
            "the best for the plan, as a run's config.toml then says."
        ),
    ] = field(default="", kw_only=True)
    participation: Participation | None = field(default=None, kw_only=True)

    @property
    def correlated(self) -> bool:
        """True."""
        return True

    @property
    def plan(self) -> Participation:
        """The rounds that a row can be in.

        Raises
        ------
        FedsimError
            If the noise was not fitted to a plan.
        """
        if self.participation is None:
            raise FedsimError(
                f"{type(self).__name__} noise is correlated over the rounds of a plan, and was "
                "given none; make a ReleasePlan of it, with its number of rounds."
            )
        return self.participation

    @abstractmethod
    def fitted(self, participation: Participation) -> Self:
        """The same noise with this `participation`, and with coefficients, found if not given."""

    @abstractmethod
    def sensitivity(self, participation: Participation) -> float:
        """The most that a row of norm 1 moves ``C X``, if it is in the rounds that it can be in."""

    @property
    @abstractmethod
    def column(self) -> float:
        """The largest norm of a column of C."""

    @property
    @abstractmethod
    def bands(self) -> int:
        """Rounds of different rows of C are not coupled from so many rounds on."""

    @abstractmethod
    def again(self, participation: Participation) -> float:
        """The most that a row moves one round of ``C X`` that is made once more."""

    def law(self, law: Law) -> CorrelatedLaw:
        """Of the plan's rounds, or of a group of them that C does not couple to others."""
        plan = self.plan
        shipped = type(law).__module__.partition(".")[0] == "fedsim"
        grouped = law.rounds == plan.separation and self.bands <= plan.separation
        amplified = shipped and law.rate < 1 and grouped
        full = FullLaw(adjacency=law.adjacency, population=law.population)
        return CorrelatedLaw(
            base=law if amplified else full,
            noise=self.name,
            coefficients=hashlib.sha256(self.coefficients.encode()).hexdigest(),
            sensitivity=self.column if amplified else self.sensitivity(plan),
            rounds=plan.separation if amplified else plan.rounds,
            again=self.again(plan),
            population=law.population,
            adjacency=law.adjacency,
        )


@dataclass(frozen=True)
class Toeplitz(Correlated):
    """Base of families whose C has the same series of numbers, 1 first, in every column."""

    @abstractmethod
    def series(self, rounds: int) -> Array:
        """The first column of C, ``[rounds]``: not negative, and nowhere increasing."""

    def sensitivity(self, participation: Participation) -> float:
        """Exact: the worst row is in the first round, and in others as soon as it can be.

        (Kalinin and Lampert 2024, Theorem 2.)
        """
        column = self.series(participation.rounds)
        moved = np.zeros_like(column)
        for j in range(participation.participations):
            start = j * participation.separation
            moved[start:] += column[: len(column) - start]
        return float(np.linalg.norm(moved))

    @property
    def column(self) -> float:
        """The norm of the first column, which no later one exceeds."""
        return float(np.linalg.norm(self.series(self.plan.rounds)))

    def again(self, participation: Participation) -> float:
        """The sum of a row of C over rounds in which one row of X can be."""
        column = self.series(participation.rounds)
        return float(column[:: participation.separation][: participation.participations].sum())
