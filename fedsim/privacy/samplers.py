"""The samplers that fedsim has: Poisson, of a fixed size, full, and shuffled passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from fedsim.errors import FedsimError
from fedsim.privacy.events import Adjacency, Event
from fedsim.privacy.sampling import Ids, SamplerDefaults, check_population, declared_population
from fedsim.randomness import Draws
from fedsim.settings import Doc, Ge, Le

__all__ = ["FixedSize", "Full", "Poisson", "ShuffledPasses", "draw_passes", "draw_poisson"]

Drawn = npt.NDArray[np.bool_]

# Standard deviations of a sample's size for which gaps are asked for at once.
SPREAD = 4.0


@dataclass(frozen=True)
class Poisson(SamplerDefaults):
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
    rate: Annotated[
        float,
        Ge(1e-9),
        Le(1.0),
        Doc("The probability with which each is in; the smaller, the less a round costs."),
    ] = 0.1
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
        return self.rate * declared_population(self)

    def draw(self, round: int, draws: Draws, step: int = 0) -> Ids:
        """Sorted ids, by the gaps between them, which are geometric; see `Sampler.draw`."""
        if self.rate == 1:
            return np.arange(declared_population(self), dtype=np.int64)
        ids, drawn = draw_poisson([self], [draws], round, [range(step, step + 1)])
        return ids[drawn]

    def law(self) -> Event:
        """Poisson sampling at the rate."""
        return Event(
            noise_multiplier=0.0,
            sampler="poisson",
            rate=self.rate,
            population=self.population,
            adjacency=self.adjacency,
        )


def draw_poisson(
    samplers: Sequence[Poisson | Full], draws: Sequence[Draws], round: int, steps: Sequence[range]
) -> tuple[Ids, Drawn]:
    """`Poisson.draw` for n owners and some steps of each, in a third of the time.

    Parameters
    ----------
    samplers, draws : sequences of n
    round : int
    steps : sequence of n ranges

    Returns
    -------
    ids : int64 ``[n, S, w]``
        Sorted for each owner and step, and 0 behind them.
    drawn : bool ``[n, S, w]``
        Which of them are ids.
    """
    population = np.array([declared_population(sampler) for sampler in samplers])[:, None, None]
    expected = max(sampler.expected_size for sampler in samplers)
    # How many gaps are asked for at a time changes none of them.
    width = int(expected + SPREAD * math.sqrt(expected)) + 4
    # Sums of gaps may pass what int64 holds, and whole numbers below 2^53 are exact in float64.
    gaps = np.full((len(samplers), max(map(len, steps)), width), np.inf)
    for sampler, owner_draws, owner_steps, rows in zip(samplers, draws, steps, gaps, strict=True):
        if sampler.rate == 1:
            rows[: len(owner_steps)] = 1
            continue
        for row, generator in zip(rows, owner_draws.generators(round, owner_steps), strict=False):
            row[:] = generator.geometric(sampler.rate, width)
    numbers = gaps.cumsum(axis=2)
    while (short := numbers[:, :, -1:] <= population).any():
        # The same address once more gives the gaps that are there and then those that follow; the
        # operating system others of the same law.
        have = numbers.shape[2]
        further = np.full_like(numbers, np.inf)
        for owner, step in np.argwhere(short[:, :, 0]).tolist():
            rate, number = samplers[owner].rate, steps[owner][step]
            generator = draws[owner].repeated().generator(round, number)
            further[owner, step] = generator.geometric(rate, 2 * have)[have:]
        numbers = np.concatenate([numbers, numbers[:, :, -1:] + further.cumsum(axis=2)], axis=2)
    drawn = numbers <= population
    return np.where(drawn, numbers - 1, 0).astype(np.int64), drawn


@dataclass(frozen=True)
class FixedSize(SamplerDefaults):
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
    size: Annotated[int, Ge(1), Doc("How many are in, of all.")] = 10
    population: int = 0  # which is refused: it must be declared

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

    def law(self) -> Event:
        """Sampling without replacement."""
        return Event(
            noise_multiplier=0.0, sampler="fixed", size=self.size, population=self.population
        )


@dataclass(frozen=True)
class Full(SamplerDefaults):
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
        return float(declared_population(self))

    @property
    def steps(self) -> int:
        """1: as a pass over everybody, it is one batch."""
        return 1

    def order(self, round: int, draws: Draws, number: int) -> Ids:
        """All ids; nothing is drawn. As `ShuffledPasses.order`."""
        return np.arange(declared_population(self), dtype=np.int64)

    def draw(self, round: int, draws: Draws, step: int = 0) -> Ids:
        """All ids; nothing is drawn."""
        return self.order(round, draws, step)

    def law(self) -> Event:
        """No sampling, and no amplification."""
        return Event(
            noise_multiplier=0.0,
            sampler="full",
            population=self.population,
            adjacency=self.adjacency,
        )


@dataclass(frozen=True)
class ShuffledPasses(SamplerDefaults):
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

    def law(self) -> Event:
        """No amplification."""
        return Event(noise_multiplier=0.0, sampler="shuffle")

    def gaussians(self, count: int) -> int:
        """One for each pass that ``count`` sums begin."""
        return -(-count // self.steps)


def draw_passes(
    sampler: ShuffledPasses | Full, draws: Sequence[Draws], round: int, passes: int
) -> Ids:
    """Passes 0 to ``passes - 1`` of n owners alike: int64 ``[n, passes, population]``.

    Each is the sampler's `order`, at a third of what one call a pass costs.
    """
    population = declared_population(sampler)
    orders = np.empty((len(draws), passes, population), dtype=np.int64)
    orders[:] = np.arange(population)
    if sampler.rate < 1:
        for owner_orders, owner_draws in zip(orders, draws, strict=True):
            generators = owner_draws.generators(round, range(passes))
            for order, generator in zip(owner_orders, generators, strict=True):
                generator.shuffle(order)
    return orders


def _check_adjacency(sampler: Poisson | Full, *allowed: str) -> None:
    if sampler.adjacency not in allowed:
        raise FedsimError(
            f"cohort.adjacency is {sampler.adjacency!r}; with {sampler.name} sampling it must be "
            f"{' or '.join(allowed)}."
        )
