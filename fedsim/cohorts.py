"""Cohorts: who takes part in a round, and the accounting event of that draw.

Sampling and accounting are one object and cannot disagree. Every client has one uniform
number a round, keyed by (seed, round, client id); a cohort only says which numbers are
in. So adding a client to the population never moves the others' numbers: under Poisson
and full participation the cohort changes by that client at most, under a fixed size by
one swap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

from fedsim.errors import FedsimError
from fedsim.privacy.events import Adjacency, Event

__all__ = ["Cohort", "FixedCohort", "FullCohort", "PoissonCohort"]

Ids = npt.NDArray[np.int64]
Uniforms = npt.NDArray[np.float64]


class Cohort(Protocol):
    """Who takes part, and what it costs. All fields are public information."""

    @property
    def name(self) -> str:
        """As in a config's ``cohort.name``."""

    @property
    def population(self) -> int | None:
        """Declared public number of clients."""

    @property
    def rate(self) -> float:
        """Probability of any one client taking part in a round, in (0, 1]."""

    @property
    def adjacency(self) -> Adjacency:
        """Which neighbouring federations the event is about."""

    @property
    def expected_size(self) -> float:
        """``rate * population``: the denominator of a private mean.

        Raises
        ------
        FedsimError
            If no population was declared: the clients seen must not stand in for it.
        """

    def draw(self, uniforms: Uniforms) -> Ids:
        """Sorted client ids of the cohort.

        Parameters
        ----------
        uniforms : float64 ``[population]``
            In [0, 1); entry i is client i's number of this round.

        Raises
        ------
        FedsimError
            If there are not as many numbers as the declared population.
        """

    def event(
        self,
        noise_multiplier: float,
        *,
        count: int = 1,
        sides: Mapping[str, float] | None = None,
        guarantee: bool = True,
    ) -> Event:
        """What one release over a cohort so drawn costs.

        Parameters
        ----------
        noise_multiplier : float
            Standard deviation of the noise on the sum divided by the clip norm.
        count : int
            Invocations on one cohort each; two releases on the *same* cohort are ``sides``.
        sides : mapping of name to float
            Noise multipliers of side scalars released from the same cohort.
        guarantee : bool
            False for a release that is not private whatever its noise.
        """


@dataclass(frozen=True)
class PoissonCohort:
    """Every client takes part with probability ``rate``, independently of all others.

    Guarantee: add-remove, with the full amplification by sampling. The cohort's size is
    Binomial(population, rate), is private, and may be 0.

    Parameters
    ----------
    rate : float
        In (0, 1].
    population : int or None
        Declared public number of clients; accounting alone does not need it.
    """

    name: ClassVar[str] = "poisson"
    rate: float
    population: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise FedsimError(f"cohort.rate is {self.rate}; it must lie in (0, 1].")
        _check_population(self.population)

    @property
    def adjacency(self) -> Adjacency:
        """Add-remove."""
        return "add-remove"

    @property
    def expected_size(self) -> float:
        """``rate * population``; needs a population."""
        return _expected_size(self)

    def draw(self, uniforms: Uniforms) -> Ids:
        """Sorted client ids of the cohort; see `Cohort.draw`."""
        _check_uniforms(self, uniforms)
        return np.flatnonzero(uniforms < self.rate).astype(np.int64)

    def event(
        self,
        noise_multiplier: float,
        *,
        count: int = 1,
        sides: Mapping[str, float] | None = None,
        guarantee: bool = True,
    ) -> Event:
        """A Poisson-sampled Gaussian."""
        return Event(
            noise_multiplier=noise_multiplier,
            sampler="poisson",
            rate=self.rate,
            population=self.population,
            count=count,
            sides=sides or {},
            guarantee=guarantee,
        )


@dataclass(frozen=True)
class FixedCohort:
    """Exactly ``size`` clients, uniformly without replacement.

    Guarantee: replace-one only, and expensive: 300 of 3000 clients over 100 rounds at a
    noise multiplier of 1.2104 and delta = 1e-5 cost epsilon 36.9, a Poisson cohort of the
    same expected size 5.0.

    Parameters
    ----------
    size : int
        In [1, population].
    population : int
        Declared public number of clients.
    """

    name: ClassVar[str] = "fixed"
    size: int
    population: int

    def __post_init__(self) -> None:
        _check_population(self.population)
        if not 1 <= self.size <= self.population:
            raise FedsimError(
                f"cohort.size is {self.size}; it must lie in [1, population = {self.population}]."
            )

    @property
    def rate(self) -> float:
        """``size / population``."""
        return self.size / self.population

    @property
    def expected_size(self) -> float:
        """The size itself."""
        return float(self.size)

    @property
    def adjacency(self) -> Adjacency:
        """Replace-one."""
        return "replace-one"

    def draw(self, uniforms: Uniforms) -> Ids:
        """Sorted client ids of the cohort; see `Cohort.draw`."""
        _check_uniforms(self, uniforms)
        # The stable sort breaks ties by id, so that the draw is a function of the numbers.
        smallest = np.argsort(uniforms, kind="stable")[: self.size]
        return np.sort(smallest).astype(np.int64)

    def event(
        self,
        noise_multiplier: float,
        *,
        count: int = 1,
        sides: Mapping[str, float] | None = None,
        guarantee: bool = True,
    ) -> Event:
        """A Gaussian on a sample without replacement."""
        return Event(
            noise_multiplier=noise_multiplier,
            sampler="fixed",
            size=self.size,
            population=self.population,
            count=count,
            sides=sides or {},
            guarantee=guarantee,
        )


@dataclass(frozen=True)
class FullCohort:
    """Every client, every round: no amplification, and the exact Gaussian curve.

    Parameters
    ----------
    population : int or None
        Declared public number of clients; accounting alone does not need it.
    adjacency : "zero-out" (default) or "replace-one"
        Zero-out: one client's update replaced by nothing. Replace-one: by any other, which
        moves the sum by twice the clip norm.
    """

    name: ClassVar[str] = "full"
    population: int | None = None
    adjacency: Literal["zero-out", "replace-one"] = field(default="zero-out", kw_only=True)

    def __post_init__(self) -> None:
        _check_population(self.population)
        if self.adjacency not in ("zero-out", "replace-one"):
            raise FedsimError(
                f"cohort.adjacency is {self.adjacency!r}; with full participation it must be "
                "zero-out or replace-one."
            )

    @property
    def rate(self) -> float:
        """1."""
        return 1.0

    @property
    def expected_size(self) -> float:
        """``rate * population``; needs a population."""
        return _expected_size(self)

    def draw(self, uniforms: Uniforms) -> Ids:
        """Sorted client ids of the cohort; see `Cohort.draw`."""
        _check_uniforms(self, uniforms)
        return np.arange(len(uniforms), dtype=np.int64)

    def event(
        self,
        noise_multiplier: float,
        *,
        count: int = 1,
        sides: Mapping[str, float] | None = None,
        guarantee: bool = True,
    ) -> Event:
        """An unamplified Gaussian."""
        return Event(
            noise_multiplier=noise_multiplier,
            sampler="full",
            population=self.population,
            adjacency=self.adjacency,
            count=count,
            sides=sides or {},
            guarantee=guarantee,
        )


def _check_population(population: int | None) -> None:
    if population is not None and population < 1:
        raise FedsimError(f"cohort.population is {population}; it must be 1 or more.")


def _check_uniforms(cohort: Cohort, uniforms: Uniforms) -> None:
    if uniforms.ndim != 1 or cohort.population not in (None, len(uniforms)):
        raise FedsimError(
            f"uniform numbers of shape {uniforms.shape} were given for a declared population of "
            f"{cohort.population}; a cohort needs one number a client."
        )


def _expected_size(cohort: Cohort) -> float:
    if cohort.population is None:
        raise FedsimError(
            f"the {cohort.name} cohort has no population; the denominator of a private mean "
            "must come from a declared one."
        )
    return cohort.rate * cohort.population
