"""Samplers: who is in (clients of a round, examples of a batch), and what the draw costs.

Sampling and accounting are one object and cannot disagree. One type serves both levels: a
cohort of clients is a sample of the population, a batch one of a client's examples. A draw
is a function of the keyed numbers of its round, and costs as much as it draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

from fedsim.errors import FedsimError
from fedsim.privacy.events import Adjacency, Event
from fedsim.randomness import Draws

__all__ = [
    "FixedSize",
    "Full",
    "Ids",
    "Poisson",
    "Sampler",
    "ShuffledPasses",
]

Ids = npt.NDArray[np.int64]


class Sampler(Protocol):
    """Who is in, and what it costs. All fields are public information.

    One of your own is *declared by the user* in ledger and statement: nobody has checked that
    its event is true of its draws. Where rows are in independently of each other, derive it from
    `fedsim.cohorts.InclusionSampler`: its event then follows from its probabilities.
    """

    @property
    def name(self) -> str:
        """As in a config's ``cohort.name``."""

    @property
    def population(self) -> int | None:
        """Declared public number of those who may be drawn."""

    @property
    def rate(self) -> float:
        """Mean probability of any one being drawn, in (0, 1]."""

    @property
    def adjacency(self) -> Adjacency:
        """Which neighbouring populations the event is about."""

    @property
    def expected_size(self) -> float:
        """``rate * population``: the denominator of a private mean.

        Raises
        ------
        FedsimError
            If no population was declared: those seen must not stand in for it.
        """

    def draw(self, round: int, draws: Draws, step: int = 0) -> Ids:
        """Ids of those who are in, each at most once.

        Parameters
        ----------
        round : int
            A sampler may follow it: groups in turn, rounds apart, a trace.
        draws : Draws
            Gives the generators: ``draws.generator(round, part)``, each address once.
        step : int
            Samples of one round are numbered; a cohort is step 0.

        Raises
        ------
        FedsimError
            If no population was declared.
        """

    def event(
        self,
        noise_multiplier: float,
        *,
        count: int = 1,
        sides: Mapping[str, float] | None = None,
        guarantee: bool = True,
    ) -> Event:
        """What noisy sums over one round's samples cost.

        Parameters
        ----------
        noise_multiplier : float
            Standard deviation of the noise on the sum divided by the clip norm.
        count : int
            Sums, over the samples of steps 0 to ``count - 1``; two releases of the *same*
            sample are ``sides``.
        sides : mapping of name to float
            Noise multipliers of side scalars released from the same samples.
        guarantee : bool
            False for a release that is not private whatever its noise.
        """


@dataclass(frozen=True)
class Poisson:
    """Everybody is in with probability ``rate``, independently of all others.

    Guarantee: add-remove, with the full amplification by sampling; zero-out where the
    population is public for a reason of its own, as a client's number of examples is. The
    sample's size is Binomial(population, rate), is private, and may be 0. Somebody new with the
    highest id changes a sample by themselves at most.

    Parameters
    ----------
    rate : float
        In (0, 1].
    population : int or None
        Declared public number; accounting alone does not need it.
    adjacency : "add-remove" (default) or "zero-out"
    """

    name: ClassVar[str] = "poisson"
    rate: float
    population: int | None = None
    adjacency: Literal["add-remove", "zero-out"] = field(default="add-remove", kw_only=True)

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise FedsimError(f"cohort.rate is {self.rate}; it must lie in (0, 1].")
        check_population(self.population)
        _check_adjacency(self, "add-remove", "zero-out")

    @property
    def expected_size(self) -> float:
        """``rate * population``; needs a population."""
        return self.rate * _declared(self)

    def draw(self, round: int, draws: Draws, step: int = 0) -> Ids:
        """Sorted ids, by the gaps between them, which are geometric; see `Sampler.draw`."""
        population = _declared(self)
        if self.rate == 1:
            return np.arange(population, dtype=np.int64)
        generator = draws.generator(round, step)
        # How many numbers are asked for at a time changes none of them.
        expected = self.rate * population
        most = int(expected + 6 * math.sqrt(expected)) + 8
        # Sums of gaps may pass what int64 holds, and whole numbers below 2^53 are exact in float64.
        ids = generator.geometric(self.rate, most).astype(np.float64).cumsum()
        while ids[-1] <= population:
            further = generator.geometric(self.rate, most).astype(np.float64).cumsum()
            ids = np.concatenate([ids, ids[-1] + further])
        return ids[: ids.searchsorted(population, "right")].astype(np.int64) - 1

    def event(
        self,
        noise_multiplier: float,
        *,
        count: int = 1,
        sides: Mapping[str, float] | None = None,
        guarantee: bool = True,
    ) -> Event:
        """A Poisson-sampled Gaussian for each sum."""
        return Event(
            noise_multiplier=noise_multiplier,
            sampler="poisson",
            rate=self.rate,
            population=self.population,
            adjacency=self.adjacency,
            count=count,
            sides=sides or {},
            guarantee=guarantee,
        )


@dataclass(frozen=True)
class FixedSize:
    """Exactly ``size``, uniformly without replacement.

    Guarantee: replace-one only, and expensive: 300 of 3000 clients over 100 rounds at a
    noise multiplier of 1.2104 and delta = 1e-5 cost epsilon 36.9, a Poisson cohort of the
    same expected size 5.0.

    Parameters
    ----------
    size : int
        In [1, population].
    population : int
        Declared public number.
    """

    name: ClassVar[str] = "fixed"
    size: int
    population: int

    def __post_init__(self) -> None:
        check_population(self.population)
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

    def draw(self, round: int, draws: Draws, step: int = 0) -> Ids:
        """Sorted ids, by Floyd's method (Bentley and Floyd 1987); see `Sampler.draw`."""
        # One number below j + 1 for each j: if it is taken, j itself is not.
        above = np.arange(self.population - self.size + 1, self.population + 1)
        chosen: set[int] = set()
        for number, bound in zip(
            draws.generator(round, step).integers(above).tolist(), above.tolist(), strict=True
        ):
            chosen.add(bound - 1 if number in chosen else number)
        return np.sort(np.fromiter(chosen, dtype=np.int64, count=self.size))

    def event(
        self,
        noise_multiplier: float,
        *,
        count: int = 1,
        sides: Mapping[str, float] | None = None,
        guarantee: bool = True,
    ) -> Event:
        """A Gaussian on a sample without replacement for each sum."""
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
class Full:
    """Everybody, every time: no amplification, and the exact Gaussian curve.

    Parameters
    ----------
    population : int or None
        Declared public number; accounting alone does not need it.
    adjacency : "zero-out" (default) or "replace-one"
        Zero-out: one row replaced by nothing. Replace-one: by any other, which moves the sum by
        twice the clip norm.
    """

    name: ClassVar[str] = "full"
    population: int | None = None
    adjacency: Literal["zero-out", "replace-one"] = field(default="zero-out", kw_only=True)

    def __post_init__(self) -> None:
        check_population(self.population)
        _check_adjacency(self, "zero-out", "replace-one")

    @property
    def rate(self) -> float:
        """1."""
        return 1.0

    @property
    def expected_size(self) -> float:
        """The population; needs one."""
        return float(_declared(self))

    @property
    def steps(self) -> int:
        """1: as a pass over everybody, it is one batch."""
        return 1

    def order(self, round: int, draws: Draws, number: int) -> Ids:
        """All ids; nothing is drawn. As `ShuffledPasses.order`."""
        return np.arange(_declared(self), dtype=np.int64)

    def draw(self, round: int, draws: Draws, step: int = 0) -> Ids:
        """All ids; nothing is drawn."""
        return self.order(round, draws, step)

    def event(
        self,
        noise_multiplier: float,
        *,
        count: int = 1,
        sides: Mapping[str, float] | None = None,
        guarantee: bool = True,
    ) -> Event:
        """An unamplified Gaussian for each sum."""
        return Event(
            noise_multiplier=noise_multiplier,
            sampler="full",
            population=self.population,
            adjacency=self.adjacency,
            count=count,
            sides=sides or {},
            guarantee=guarantee,
        )


@dataclass(frozen=True)
class ShuffledPasses:
    """Passes over everybody in an order of their own, cut into batches; the last may be short.

    Guarantee: zero-out. Everybody is in one batch a pass, which costs one Gaussian without
    amplification: the order is not secret enough to be credited.

    Parameters
    ----------
    batch_size : int
        In [1, population].
    population : int
        Declared public number.
    """

    name: ClassVar[str] = "shuffle"
    batch_size: int
    population: int

    def __post_init__(self) -> None:
        check_population(self.population)
        if not 1 <= self.batch_size <= self.population:
            raise FedsimError(
                f"the batch size is {self.batch_size}; it must lie in [1, population = "
                f"{self.population}]."
            )

    @property
    def rate(self) -> float:
        """``batch_size / population``."""
        return self.batch_size / self.population

    @property
    def expected_size(self) -> float:
        """The batch size, also where a pass's last batch is short."""
        return float(self.batch_size)

    @property
    def adjacency(self) -> Adjacency:
        """Zero-out."""
        return "zero-out"

    @property
    def steps(self) -> int:
        """Batches in one pass."""
        return -(-self.population // self.batch_size)

    def order(self, round: int, draws: Draws, number: int) -> Ids:
        """Pass ``number`` of a round: all ids, in the order in which batches take them."""
        return draws.generator(round, number).permutation(self.population)

    def draw(self, round: int, draws: Draws, step: int = 0) -> Ids:
        """The ids of one batch; see `Sampler.draw`. `order` gives a pass at a time."""
        number, batch = divmod(step, self.steps)
        first = batch * self.batch_size
        return self.order(round, draws, number)[first : first + self.batch_size]

    def event(
        self,
        noise_multiplier: float,
        *,
        count: int = 1,
        sides: Mapping[str, float] | None = None,
        guarantee: bool = True,
    ) -> Event:
        """An unamplified Gaussian for each pass that ``count`` sums begin."""
        return Event(
            noise_multiplier=noise_multiplier,
            sampler="shuffle",
            count=-(-count // self.steps),
            sides=sides or {},
            guarantee=guarantee,
        )


def check_population(population: int | None) -> None:
    if population is not None and population < 1:
        raise FedsimError(f"cohort.population is {population}; it must be 1 or more.")


def _check_adjacency(sampler: Poisson | Full, *allowed: str) -> None:
    if sampler.adjacency not in allowed:
        raise FedsimError(
            f"cohort.adjacency is {sampler.adjacency!r}; with {sampler.name} sampling it must be "
            f"{' or '.join(allowed)}."
        )


def _declared(sampler: Sampler) -> int:
    if sampler.population is None:
        raise FedsimError(
            f"the {sampler.name} cohort has no population; draws and the denominator of a private "
            "mean must come from a declared one."
        )
    return sampler.population
