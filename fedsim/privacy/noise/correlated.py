"""Base of noises that are correlated over rounds (matrix factorisation mechanisms).

T rounds release ``X + C^-1 Z``: X ``[T, d]`` are their sums, C is lower triangular with ones on
its diagonal, and Z ``[T, d]`` are fresh draws. A round's noise cancels part of earlier noise. The
model is a sum over rounds, so that it carries less noise in total than with independent noise.
Multiplied by C the release is ``C X + Z``, one Gaussian mechanism, whose sensitivity depends on
the rounds that one row can be in (Denisov et al. 2022; Choquette-Choo et al. 2023).
"""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import numpy as np

from fedsim.array_types import Floats
from fedsim.errors import FedsimError
from fedsim.privacy.laws.base import Law, Participation, is_shipped
from fedsim.privacy.laws.correlated import CorrelatedLaw
from fedsim.privacy.laws.full import FullLaw
from fedsim.privacy.noise.base import Noise


@dataclass(frozen=True)
class Correlated(Noise):
    """Base of noises that are correlated over rounds; a subclass defines its matrix C.

    Guarantee: all rounds of a plan together are one Gaussian, with this multiplier divided by
    `sensitivity`. Where rows are sampled within groups of rounds that C does not couple, each
    such group of rounds is one sampled Gaussian, with this multiplier divided by `column_norm`.

    Raises
    ------
    FedsimError
        If the coefficients do not describe a C of this family.
    """

    name: ClassVar[str]
    """Name in a config's ``noise.name``."""
    form: ClassVar[str] = "numbers from 0 to 1"
    """What the coefficients must be (`are_coefficients`), in words."""

    coefficients: str = field(default="", kw_only=True)
    """Coefficients that combine the draws of this and earlier rounds into a round's noise; empty to
    find the best for the plan (a run's config.toml has them then)."""
    participation: Participation | None = field(default=None, kw_only=True)

    @property
    def correlated(self) -> bool:
        """True: rounds share draws."""
        return True

    @property
    def known_participation(self) -> Participation:
        """The rounds that one row can be in.

        Raises
        ------
        FedsimError
            If the noise was not fitted to a plan.
        """
        if self.participation is None:
            raise FedsimError(
                f"{type(self).__name__} noise is correlated over the rounds of a plan, and has no "
                "plan; use it in a ReleasePlan with a number of rounds."
            )
        return self.participation

    def fit(self, participation: Participation) -> Self:
        """This noise for a participation; coefficients that were not given are optimised for it."""
        return self.with_coefficients(
            self.coefficients or self.best_coefficients(participation), participation
        )

    def with_coefficients(self, coefficients: str, participation: Participation) -> Self:
        """This noise for a participation, with these coefficients."""
        return replace(self, coefficients=coefficients, participation=participation)

    def best_coefficients(self, participation: Participation) -> str:
        """Coefficients with the least error of sums over rounds; by default there are none."""
        return ""

    def are_coefficients(self, numbers: Sequence[float]) -> bool:
        """Whether these numbers, one or more, are coefficients of this noise: of its `form`."""
        return all(0 <= number <= 1 for number in numbers)

    def coefficient_values(self) -> list[float]:
        """The coefficients as numbers.

        Raises
        ------
        FedsimError
            If they are no coefficients of this noise (`are_coefficients`).
        """
        try:
            numbers = [float(word) for word in self.coefficients.split()]
        except ValueError:
            numbers = []
        if not numbers or not self.are_coefficients(numbers):
            raise FedsimError(
                f"noise.coefficients is {self.coefficients!r}; with noise.name = '{self.name}' it "
                f"must be {self.form}."
            )
        return numbers

    @abstractmethod
    def sensitivity(self, participation: Participation) -> float:
        """L2 sensitivity of ``C X`` to a row of norm 1, in all rounds that the row can be in."""

    @property
    @abstractmethod
    def column_norm(self) -> float:
        """Largest norm of a column of C: the sensitivity to a row in a single round."""

    @property
    @abstractmethod
    def bands(self) -> int:
        """Number of bands of C: columns at least so far apart have no row in common."""

    @abstractmethod
    def repeat_sensitivity(self, participation: Participation) -> float:
        """L2 sensitivity to a row of repeating one round with different data: of one row of CX."""

    @abstractmethod
    def matrix(self, rounds: int) -> Floats:
        """The lower triangular C: for noise N over rounds, ``C N`` has unit covariance (at z = 1).

        Returns
        -------
        float64 ``[rounds, rounds]``
        """

    @abstractmethod
    def variances(self, rounds: int) -> Floats:
        """Variance of one coordinate of the summed noise of rounds 1 to t, at multiplier 1."""

    def error(self, noise_multiplier: float | None = None) -> float:
        """Root mean square noise of the sums over rounds 1 to t, all t of the plan, in units of C.

        Parameters
        ----------
        noise_multiplier : float, optional
            Multiplier of the whole plan as one Gaussian, to compare noises at equal privacy cost.
            By default the one that follows from this noise's own multiplier.
        """
        z = self.multiplier
        if noise_multiplier is not None:
            z = noise_multiplier * self.sensitivity(self.known_participation)
        return z * float(np.sqrt(self.variances(self.known_participation.rounds).mean()))

    def law(self, law: Law) -> CorrelatedLaw:
        """Law of all rounds of the plan, or of a group of rounds where sampling amplifies.

        Sampling amplifies only if the sampler's groups of rounds are at least as long as C has
        bands: different rounds of a row are then in different, uncoupled parts of ``C X``, and
        each is a sampled Gaussian of sensitivity `column_norm`. In all other cases the sampling is
        ignored, and the plan is one Gaussian of the full `sensitivity`.
        """
        participation = self.known_participation
        grouped = law.rounds == participation.separation and self.bands <= participation.separation
        amplified = is_shipped(law) and law.rate < 1 and grouped
        full = FullLaw(adjacency=law.adjacency, population=law.population)
        return CorrelatedLaw(
            base=law if amplified else full,
            noise=self.name,
            coefficients=hashlib.sha256(self.coefficients.encode()).hexdigest(),
            sensitivity=self.column_norm if amplified else self.sensitivity(participation),
            rounds=participation.separation if amplified else participation.rounds,
            again=self.repeat_sensitivity(participation),
            population=law.population,
            adjacency=law.adjacency,
        )


@dataclass(frozen=True)
class Toeplitz(Correlated):
    """Base of noises whose C is a lower triangular Toeplitz matrix, given by its first column."""

    @abstractmethod
    def series(self, rounds: int) -> Floats:
        """First column of C, beginning with 1, ``[rounds]``."""

    def sensitivity(self, participation: Participation) -> float:
        """L2 sensitivity of ``C X`` to a row in round 1, and again as early and often as it can.

        No other participation is worse if the series is non-negative and never increases (Kalinin
        and Lampert 2024, Theorem 2). Any other series is replaced by its least such majorant,
        which gives an upper bound.
        """
        # The worst row is the same vector in each of its rounds: it moves C X by the sum of these
        # rounds' columns, each the first one shifted down.
        column = majorant(self.series(participation.rounds))
        shifted = np.zeros_like(column)
        for j in range(participation.participations):
            start = j * participation.separation
            shifted[start:] += column[: len(column) - start]
        return l2_norm(shifted)

    @property
    def column_norm(self) -> float:
        """Norm of the first column of C; later ones are parts of it."""
        return l2_norm(majorant(self.series(self.known_participation.rounds)))

    def repeat_sensitivity(self, participation: Participation) -> float:
        """Sum of a row of C over the rounds that one row can be in, the repeated one among them."""
        column = majorant(self.series(participation.rounds))
        return math.fsum(column[:: participation.separation][: participation.participations])

    def matrix(self, rounds: int) -> Floats:
        """C, from its first column."""
        ages = np.subtract.outer(np.arange(rounds), np.arange(rounds))
        return np.where(ages >= 0, self.series(rounds)[np.abs(ages)], 0.0)

    def variances(self, rounds: int) -> Floats:
        """Variance of one coordinate of the summed noise of rounds 1 to t, at multiplier 1.

        A draw of age a is in the sum with a factor: coefficient a of ``1 / (c(x) (1 - x))``.
        """
        return np.asarray(np.cumsum(np.square(prefix_sum_factors(self.series(rounds)))))


def majorant(series: Floats) -> Floats:
    """Least series that never increases and bounds the absolute values, in steps of 2^-40.

    The steps keep the last bits of a library's result, which vary between machines and processes,
    out of the sensitivity that a ledger records.
    """
    # Rounded up, except for values less than 2^-48 above a step: these differ from the step by a
    # rounding error, and would otherwise be a step higher on some machines.
    above = np.maximum.accumulate(np.abs(series)[::-1])[::-1]
    return np.asarray(np.ceil(above * 2.0**40 - 2.0**-8) * 2.0**-40)


def l2_norm(vector: Floats) -> float:
    """L2 norm, with the sum of squares rounded only once: it does not depend on their order."""
    return math.sqrt(math.fsum(number * number for number in vector.tolist()))


def prefix_sum_factors(series: Floats) -> Floats:
    """Factor with which a draw of age 0, 1, ... is in the sum of the rounds so far, ``[rounds]``.

    It is the solution b of ``C b = 1`` for the Toeplitz matrix of a series: the sums' noise is
    ``A C^-1 Z`` with A the matrix of prefix sums, and ``A C^-1`` is Toeplitz with first column b.
    """
    return solve_toeplitz(series, np.ones(len(series)))


def solve_toeplitz(series: Floats, right: Floats, *, transposed: bool = False) -> Floats:
    """``C^-1 right`` for the Toeplitz matrix of a series; ``C^-T right`` if ``transposed``."""
    from scipy.linalg.blas import dtbsv

    # Band storage, cut at the last non-zero coefficient: a series of b coefficients takes time
    # and memory O(b * rounds), where a dense solve would take O(rounds^2).
    (nonzero,) = np.nonzero(series)
    width = int(nonzero[-1])
    band = np.repeat(series[: width + 1, None], len(right), axis=1)
    return np.asarray(dtbsv(width, band, right, lower=1, trans=int(transposed)))


def format_coefficients(numbers: Sequence[float] | Floats) -> str:
    """Coefficients as a config's text, rounded so that every machine finds the same ones."""
    return " ".join(f"{number:.6g}" for number in numbers)
