"""Noise that is correlated over rounds: what its families have in common.

T rounds release ``X + C^-1 Z`` for their sums X, a lower triangular matrix C with ones on its
diagonal and fresh draws Z: later noise takes part of the earlier away again, so that sums over
rounds, which a model is, carry less. In units of C the rounds are one Gaussian, ``C X + Z``, whose
sensitivity depends on the rounds that one row can be in (Denisov et al. 2022; Choquette-Choo et
al. 2023).
"""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Self

import numpy as np
import numpy.typing as npt

from fedsim.errors import FedsimError
from fedsim.privacy.laws.base import Law, Participation, is_shipped
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
    local: ClassVar[bool] = False
    """Whether clients may add it to the steps of a round: it keeps no vector for each of them, or
    few."""

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
    def known_participation(self) -> Participation:
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
        """Columns of C that are so many rounds apart have no row in common."""

    @abstractmethod
    def again(self, participation: Participation) -> float:
        """The most that a row moves what is released of one round that is made once more."""

    @abstractmethod
    def matrix(self, rounds: int) -> Array:
        """A lower triangular C for which ``C N`` is white, of unit variance at multiplier 1.

        Returns
        -------
        float64 ``[rounds, rounds]``
        """

    @abstractmethod
    def variances(self, rounds: int) -> Array:
        """Variance of a coordinate of the first t rounds' noise together, for multiplier 1."""

    def error(self, noise_multiplier: float | None = None) -> float:
        """Root mean square over the plan of the noise in sums over rounds, in units of C.

        Parameters
        ----------
        noise_multiplier : float, optional
            Of the plan as one Gaussian; by default that which this noise's own multiplier gives.
        """
        z = self.multiplier
        if noise_multiplier is not None:
            z = noise_multiplier * self.sensitivity(self.known_participation)
        return z * float(np.sqrt(self.variances(self.known_participation.rounds).mean()))

    def law(self, law: Law) -> CorrelatedLaw:
        """Of the plan's rounds, or of a group of them that C does not couple to others."""
        participation = self.known_participation
        grouped = law.rounds == participation.separation and self.bands <= participation.separation
        amplified = is_shipped(law) and law.rate < 1 and grouped
        full = FullLaw(adjacency=law.adjacency, population=law.population)
        return CorrelatedLaw(
            base=law if amplified else full,
            noise=self.name,
            coefficients=hashlib.sha256(self.coefficients.encode()).hexdigest(),
            sensitivity=self.column if amplified else self.sensitivity(participation),
            rounds=participation.separation if amplified else participation.rounds,
            again=self.again(participation),
            population=law.population,
            adjacency=law.adjacency,
        )

    def _numbers(self, wanted: str) -> list[float]:
        """The coefficients as numbers, in [0, 1] each.

        Raises
        ------
        FedsimError
            If they are not, saying what is ``wanted``.
        """
        try:
            numbers = [float(word) for word in self.coefficients.split()]
        except ValueError:
            numbers = []
        if not numbers or not all(0 <= number <= 1 for number in numbers):
            raise FedsimError(
                f"noise.coefficients is {self.coefficients!r}; with noise.name = '{self.name}' it "
                f"must be {wanted}."
            )
        return numbers


@dataclass(frozen=True)
class Toeplitz(Correlated):
    """Base of families whose C has the same series of numbers, 1 first, in every column."""

    @abstractmethod
    def series(self, rounds: int) -> Array:
        """The first column of C, ``[rounds]``."""

    def sensitivity(self, participation: Participation) -> float:
        """Of a row in the first round, and in others as soon as it can be.

        No other is worse, if the series is not negative and nowhere increases (Kalinin and Lampert
        2024, Theorem 2); the least such series above it is an upper bound for any other.
        """
        column = majorant(self.series(participation.rounds))
        moved = np.zeros_like(column)
        for j in range(participation.participations):
            start = j * participation.separation
            moved[start:] += column[: len(column) - start]
        return length(moved)

    @property
    def column(self) -> float:
        """The norm of the first column, which no later one exceeds."""
        return length(majorant(self.series(self.known_participation.rounds)))

    def again(self, participation: Participation) -> float:
        """The sum of a row of C over rounds in which one row of X can be."""
        column = majorant(self.series(participation.rounds))
        return math.fsum(column[:: participation.separation][: participation.participations])

    def matrix(self, rounds: int) -> Array:
        """C itself."""
        ages = np.subtract.outer(np.arange(rounds), np.arange(rounds))
        return np.where(ages >= 0, self.series(rounds)[np.abs(ages)], 0.0)

    def variances(self, rounds: int) -> Array:
        """By what is left of a draw after each round, the series ``1 / (c(x) (1 - x))``."""
        return np.asarray(np.cumsum(np.square(remaining(self.series(rounds)))))


def majorant(series: Array) -> Array:
    """A series above the absolute values that nowhere increases: the least in steps of 2^-40.

    A library's last bits, which vary from process to process, do not enter what a ledger says.
    """
    above = np.maximum.accumulate(np.abs(series)[::-1])[::-1]
    return np.asarray(np.ceil(above * 2.0**40 - 2.0**-8) * 2.0**-40)


def length(vector: Array) -> float:
    """L2 norm, of exact sums."""
    return math.sqrt(math.fsum(number * number for number in vector.tolist()))


def remaining(series: Array) -> Array:
    """What is left of a draw in the sum over rounds, ``[rounds]`` from its own round on.

    The solution b of ``C b = 1`` for the Toeplitz matrix of a series.
    """
    return solved(series, np.ones(len(series)))


def solved(series: Array, right: Array, *, transposed: bool = False) -> Array:
    """``C^-1`` times a vector, for the Toeplitz matrix of a series; or its transpose's inverse."""
    from scipy.linalg.blas import dtbsv

    (others,) = np.nonzero(series)
    width = int(others[-1])
    band = np.repeat(series[: width + 1, None], len(right), axis=1)
    return np.asarray(dtbsv(width, band, right, lower=1, trans=int(transposed)))


def text_of(numbers: Sequence[float] | Array) -> str:
    """Coefficients as a config has them: rounded, so that every machine finds the same ones."""
    return " ".join(f"{number:.6g}" for number in numbers)
