"""Random allocation: each client takes part in exactly k of T rounds, drawn at random.

If a row is in one of t rounds, the t sums together have the distribution
``(1/t) sum_i N(e_i, z^2 I)`` with the row and ``N(0, z^2 I)`` without it. Under the latter their
density ratio is a mean of t independent lognormal variables. Being in k of T rounds costs at most
as much as being k times in one of ``floor(T / k)`` rounds (Feldman and Shenfeld 2025).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar

import numpy as np
from scipy.special import gammaln, log_ndtr, logsumexp, ndtr

from fedsim.array_types import Floats, Ints
from fedsim.errors import FedsimError
from fedsim.privacy.laws.base import Law, Participation, WrappingLaw
from fedsim.privacy.laws.sampler import RememberingSampler, declared_population
from fedsim.privacy.losses import (
    ORDERS,
    RELEASE_TAIL,
    AtomicPair,
    DominatingPair,
    Reversed,
    SampledGaussian,
    gaussian_rdp,
    normal_masses,
)
from fedsim.randomness import Draws
from fedsim.registry import register
from fedsim.settings import Ge

STEPS_PER_STD = 40
"""Points of the grid of log S in one standard deviation of it."""
MAX_POINTS = 4096
"""About the most points of that grid; a coarser grid is still an upper bound."""
REACH = 9.0
"""Standard deviations that the grid covers; what is above it counts as an infinite loss."""
MAX_MOMENT = 64
"""Largest order for which moments of S are computed."""
MIN_AMPLIFIED_NOISE = 0.05
"""Least z of a grid, whose largest losses are about ``1 / (2 z^2) + REACH / z``."""


@dataclass(frozen=True, kw_only=True)
class AllocationLaw(Law):
    """Law of random allocation: each row is in ``participations`` of ``rounds`` random rounds.

    The plan is charged as ``participations`` equal parts, in each of which a row is in one of
    ``floor(rounds / participations)`` rounds; one event of this law is one part. With ``blocks``,
    where a row is in one round of each block of consecutive rounds, this is the exact composition;
    otherwise it is an upper bound.
    """

    name: ClassVar[str] = "allocation"
    participations: Annotated[int, Ge(1)] = 1
    rounds: Annotated[int, Ge(1)] = 1
    blocks: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_parts(self)

    @property
    def rate(self) -> float:
        """Probability that a row is in a given round."""
        return self.participations / self.rounds

    @property
    def rounds_per_part(self) -> int:
        """Rounds of one part, of which a row is in one: t."""
        return self.rounds // self.participations

    @property
    def known_sample_law(self) -> Law:
        """One Gaussian for each participation."""
        return KnownAllocationLaw(base=self, population=self.population, adjacency="zero-out")

    def gaussian(self, noise_multiplier: float) -> float | None:
        """``1 / z`` if a part has only one round, or z is extreme (`_exceeds_grid`); else None.

        It is the cost to an adversary who knows the round, and therefore always an upper bound.
        """
        rounds = self.rounds_per_part
        is_gaussian = rounds == 1 or _exceeds_grid(rounds, noise_multiplier)
        return 1 / noise_multiplier if is_gaussian else None

    def pairs(self, noise_multiplier: float) -> tuple[DominatingPair, DominatingPair]:
        """Dominating pairs of one part, both directions: upper bounds within about 1 %."""
        if self.gaussian(noise_multiplier) is not None:
            return SampledGaussian(1.0, noise_multiplier).both_directions
        pair = AllocatedGaussian(self.rounds_per_part, noise_multiplier)
        return pair, Reversed(pair)

    def rdp(self, noise_multiplier: float) -> Floats:
        """Rényi curve of one part: an upper bound on both directions."""
        if (mu := self.gaussian(noise_multiplier)) is not None:
            return gaussian_rdp(mu)
        return allocation_rdp(self.rounds_per_part, noise_multiplier)

    def inclusion(self, population: int) -> None:
        """None: a client's participations in different rounds are not independent."""

    @property
    def label(self) -> str:
        """Short description, for tables."""
        return f"{self.words} rounds, at random"

    @property
    def words(self) -> str:
        """How many of which rounds a row is in, such as "2 of 20"."""
        return (
            f"one of each {self.rounds_per_part:,}"
            if self.blocks
            else f"{self.participations:,} of {self.rounds:,}"
        )

    def sentence(self, row: str) -> str:
        """How a ``row`` is sampled: a phrase of the privacy statement."""
        return f"each {row} in {self.words} rounds (random allocation: in which must stay secret)"

    def round_sentence(self, population: int) -> str:
        """Which clients take part in a round: a sentence for reports."""
        return (
            f"Every client takes part in {self.words} rounds, drawn at random: about "
            f"{self.expected_size(population):,.4g} of {population:,} in a round."
        )


@dataclass(frozen=True, kw_only=True)
class KnownAllocationLaw(WrappingLaw):
    """Law of a random allocation for an adversary who knows the rounds of each row.

    The plan is charged as ``participations`` plain Gaussians, one for each round that a row is in;
    one event of this law is one of them.
    """

    name: ClassVar[str] = "known-allocation"

    base: AllocationLaw

    @property
    def rate(self) -> float:
        """1: there is no amplification."""
        return 1.0

    @property
    def rounds(self) -> int:
        """Number of rounds of the plan."""
        return self.base.rounds

    def inclusion(self, population: int) -> None:
        """None: a row's participations in different rounds are not independent."""

    @property
    def label(self) -> str:
        """Short description, for tables."""
        return f"{self.base.label}, no amplification"

    def sentence(self, row: str) -> str:
        """How a ``row`` is sampled: a phrase of the privacy statement."""
        return (
            f"each {row} in {self.base.words} rounds, which the adversary knows (no amplification "
            "by sampling)"
        )


def _exceeds_grid(rounds: int, z: float) -> bool:
    """Whether z is so small or large that the Gaussian of a known round is a better bound.

    With little noise the masses of the grid's largest losses underflow. With much noise its step
    is above the standard deviation of the loss, ``1 / z``.
    """
    return z < MIN_AMPLIFIED_NOISE or z * math.log(rounds) > 1.5 * MAX_POINTS


def _check_parts(plan: AllocationLaw | Allocation, prefix: str = "") -> None:
    """Refuse numbers of rounds that cannot be cut into a part for each participation."""
    count, rounds = plan.participations, plan.rounds
    if count > rounds:
        raise FedsimError(
            f"{prefix}participations is {count}; it must be at most the run's rounds, {rounds}."
        )
    if plan.blocks and rounds % count:
        raise FedsimError(
            f"{prefix}participations is {count}; with {prefix}blocks it must divide the run's "
            f"rounds, {rounds}."
        )


@dataclass(frozen=True)
class AllocatedGaussian(AtomicPair):
    """Dominating pair of removing a row that is in one of ``rounds`` rounds, at multiplier z.

    The density ratio of ``upper`` (with the row) to ``lower`` is S, a mean of lognormal variables.
    Each term and each partial sum is put on a grid of log S; mass between two grid points is split
    between both so that its mean is unchanged. This only spreads S, and a pair whose density ratio
    is more spread at equal mean is easier to distinguish (Blackwell 1951). Hence the result
    dominates, in both directions and under composition.
    """

    rounds: int
    noise_multiplier: float

    def loss_range(self) -> tuple[float, float]:
        """The least and the largest finite loss, up to negligible mass."""
        losses, upper, lower = self._atoms()
        (support,) = np.nonzero(
            (np.cumsum(upper + lower) > RELEASE_TAIL)
            & (np.cumsum((upper + lower)[::-1])[::-1] > RELEASE_TAIL)
        )
        return float(losses[support[0]]), float(losses[support[-1]])

    def masses(self, grid: Floats) -> tuple[Floats, Floats]:
        """Masses of ``upper`` and ``lower`` below, between and above the grid's points."""
        places = np.searchsorted(grid, self._atoms()[0])
        upper, lower = self._sums(places, len(grid) + 1)
        # Mass that the atoms lack is where only one of the two densities is positive: `upper` then
        # has the loss +infinity, `lower` (at S = 0) -infinity.
        upper[-1] += max(0.0, 1.0 - float(upper.sum()))
        lower[0] += max(0.0, 1.0 - float(lower.sum()))
        return upper, lower

    def _atoms(self) -> tuple[Floats, Floats, Floats]:
        losses, lower = _mean_of_lognormals(self.rounds, self.noise_multiplier)
        return losses, lower * np.exp(losses), lower


@lru_cache(maxsize=32)
def _mean_of_lognormals(
    terms: int, noise_multiplier: float, *, capped: bool = False
) -> tuple[Floats, Floats]:
    """Distribution of log S on a grid: the points, and the mass at each.

    S is the mean of ``terms`` variables ``exp(x / z^2 - 1 / (2 z^2))``, x normal with standard
    deviation z. Mass that is missing from a sum of 1 is at S = 0. With ``capped`` mass above the
    grid is moved down to its last point instead, so that none is at S = 0.
    """
    z = noise_multiplier
    low = -1 / (2 * z**2) - REACH / z - math.log(terms)
    high = 1 / (2 * z**2) + REACH / z
    # The standard deviation of S is sqrt((e^(1/z^2) - 1) / t); that of log S is about
    # sqrt(log(1 + std^2)). The exponent is capped against overflow; the grid is then at its
    # coarsest anyway.
    spread = math.sqrt(math.log1p(math.expm1(min(1 / z**2, 700.0)) / terms))
    step = max(min(spread, 1 / z) / STEPS_PER_STD, (high - low) / MAX_POINTS)
    points = math.ceil((high - low) / step) + 1
    grid: Floats = low + step * np.arange(points, dtype=np.float64)
    term = _split_lognormal(grid + math.log(terms), z)
    if capped:
        term[-1] += 1 - term.sum()
    # Sums of 2, 4, 8, ... terms by doubling; those of the binary digits of `terms` are added.
    result, doubled = None, term
    for digit in range(terms.bit_length()):
        if digit:
            doubled = _sum(doubled, doubled, step)
        if terms >> digit & 1:
            result = doubled if result is None else _sum(result, doubled, step)
    assert result is not None
    return grid, result


def _split_lognormal(log_values: Floats, z: float) -> Floats:
    """Masses of one lognormal variable on a grid of its logarithm, with unchanged mean.

    Mass above the last point is left out, and so counts as 0: its share of the mean, which is
    mass of ``upper``, is then missing there and becomes an infinite loss.
    """
    # Mass between points under `lower`, where x / z is standard normal, and the same mass times
    # the variable itself, which is mass under N(1, z^2): normal again, shifted by 1 / z.
    below = (log_values + 1 / (2 * z**2)) * z
    mass, weighted = (normal_masses(points)[1:-1] for points in (below, below - 1 / z))
    values = np.exp(log_values)
    # The part r of the mass that is moved to the right end v1 solves
    # r v1 + (mass - r) v0 = weighted; the rest is moved to the left end v0.
    to_right = np.clip((weighted - mass * values[:-1]) / np.diff(values), 0.0, mass)
    atoms = np.zeros(len(values))
    atoms[:-1] += mass - to_right
    atoms[1:] += to_right
    # Mass below the first point is split between that point and 0, again with unchanged mean.
    atoms[0] += float(ndtr(below[0] - 1 / z)) / values[0]
    return atoms


def _sum(one: Floats, other: Floats, step: float) -> Floats:
    """Masses of the sum of two independent variables, all on one grid of logarithms.

    Mass that is missing from a sum of 1 is at the value 0, in the arguments and in the result.
    """
    points = len(one)
    total = np.zeros(2 * points)
    offsets = np.arange(points)
    # On a grid of logarithms, if x is k steps below y, then x + y is above y by a shift that
    # depends on k alone: a whole number of steps, and a fraction of one. The mass is split between
    # the two nearest points, in the ratio that leaves the mean (not that of the logarithm) as is.
    larger = np.log1p(np.exp(-step * offsets)) / step
    steps = np.floor(larger + 1e-12).astype(int)
    part = np.expm1((larger - steps) * step) / math.expm1(step)
    part = np.clip(part, 0.0, 1.0)
    for k in range(points):
        products = one[: points - k] * other[k:]
        if k:
            products += other[: points - k] * one[k:]
        start = k + int(steps[k])
        total[start : start + len(products)] += (1 - part[k]) * products
        total[start + 1 : start + 1 + len(products)] += part[k] * products
    # One of the two is 0: the sum is the other.
    total[:points] += (1 - one.sum()) * other + (1 - other.sum()) * one
    # Sums above the grid are dropped like single variables above it: they become infinite losses.
    return total[:points]


@lru_cache(maxsize=256)
def allocation_rdp(rounds: int, noise_multiplier: float) -> Floats:
    """RDP at `ORDERS` of a row in one of ``rounds`` rounds: an upper bound on both directions."""
    z = noise_multiplier
    # Row removed, for whole orders m: the divergence is log E S^m / (m - 1). One variable L has
    # E L^m = exp(m (m - 1) / (2 z^2)). The generating function sum_m E L^m x^m / m!, raised to the
    # power t, has the moments of the sum of t of them; by squaring, in logarithms.
    m = np.arange(MAX_MOMENT + 1)
    series = m * (m - 1) / (2 * z**2) - gammaln(m + 1)
    power = np.where(m == 0, 0.0, -np.inf)
    for bit in bin(rounds)[2:]:
        power = _product(power, power)
        if bit == "1":
            power = _product(power, series)
    cumulants = power + gammaln(m + 1) - m * math.log(rounds)
    # log E S^m is convex in m and 0 at m = 1: chords between whole orders are upper bounds. So is
    # the curve of a row whose round is known.
    chord = np.interp(ORDERS, m[1:], cumulants[1:], right=np.inf)
    removed = np.minimum(chord / (ORDERS - 1), gaussian_rdp(1 / z))
    return np.asarray(np.maximum(removed, _added_rdp(rounds, z)))


def _added_rdp(rounds: int, z: float) -> Floats:
    """RDP at `ORDERS` of adding a row: ``log E S^(1 - order) / (order - 1)``, an upper bound."""
    powers = ORDERS - 1
    # S is at least the geometric mean of its terms, whose moments are known.
    geometric = 1 / (2 * z**2) + powers / (2 * rounds * z**2)
    # Or take S on the grid, which is more spread. That bounds what all terms on the grid
    # contribute. If a term lies below it, which happens with probability at most `rounds` times
    # that of one, the geometric mean bounds S again: a moment of a normal below a limit.
    losses, lower = _mean_of_lognormals(rounds, z, capped=True)
    (positive,) = np.nonzero(lower > 0)
    on_grid = logsumexp(np.log(lower[positive]) - powers[:, None] * losses[positive], axis=1)
    below = math.log(rounds) + log_ndtr(powers / (rounds * z) - REACH) + powers * geometric
    return np.asarray(np.minimum(geometric, np.logaddexp(on_grid, below) / powers))


def _product(one: Floats, other: Floats) -> Floats:
    """Product of two power series, truncated to their length; coefficients are logarithms."""
    size = len(one)
    return np.array([logsumexp(one[: n + 1] + other[n::-1]) for n in range(size)])


@register("cohort", "allocation")
@dataclass(frozen=True)
class Allocation(RememberingSampler):
    """Each client takes part in exactly k rounds of the plan, drawn at random.

    Guarantee: add-remove or zero-out, for the plan as a whole: it is charged before its first
    round. Clients draw their rounds independently of each other, so that cohorts vary in size.

    Parameters
    ----------
    participations : int
        k, the number of rounds of each client, from 1 to the number of rounds.
    rounds : int
        T, the number of rounds of the plan; it cannot be changed later.
    blocks : bool
        Whether a client takes part once in each block of T / k consecutive rounds. The cost is
        the same.
    population : int or None
        Number of clients: declared, public.
    """

    name: ClassVar[str] = "allocation"
    participations: Annotated[int, Ge(1)] = 1
    """In how many of the run's rounds each client takes part."""
    rounds: int = 1
    population: int | None = None
    blocks: bool = False
    """Whether a client takes part once in each of `participations` equal parts of the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_parts(self, "cohort.")

    def draw(self, round: int, draws: Draws, step: int = 0) -> Ints:
        """Sorted ids; rounds must be drawn in order.

        Raises
        ------
        FedsimError
            If the round is not the next one of the plan.
        """
        if not self.memory:
            remaining = np.full(declared_population(self), self.participations)
            self.memory.update(round=0, left=remaining)
        if round != self.memory["round"] + 1 or round > self.rounds:
            raise FedsimError(
                f"round {round} follows round {self.memory['round']} of a random allocation; its "
                f"{self.rounds} rounds must be drawn once each, in turn."
            )
        remaining = self.memory["left"]
        length = self.rounds // self.participations if self.blocks else self.rounds
        before = (round - 1) % length
        if self.blocks and not before:
            remaining[:] = 1
        # A client that still has to take part r times in the m rounds that are left does so now
        # with probability r / m. Every choice of its rounds is then equally likely.
        numbers = draws.generator(round, step).random(len(remaining))
        ids: Ints = np.flatnonzero(numbers * (length - before) < remaining)
        remaining[ids] -= 1
        self.memory["round"] = round
        return ids

    def law(self) -> AllocationLaw:
        """Random allocation of ``participations`` out of ``rounds`` rounds."""
        return AllocationLaw(
            participations=self.participations,
            rounds=self.rounds,
            blocks=self.blocks,
            population=self.population,
        )

    def gaussians(self, count: int) -> int:
        """The number of parts, k: they cover the whole plan, for any ``count``."""
        return self.participations

    def participation(self, rounds: int) -> Participation:
        """Any rounds, but at most ``participations`` of them."""
        return Participation(rounds, most=self.participations)
