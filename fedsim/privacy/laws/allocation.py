"""Random allocation: each client in exactly k of T rounds, which it draws for itself.

Where a row is in one of t rounds, the sums of all t are ``(1/t) sum_i N(e_i, z^2 I)`` against
``N(0, z^2 I)``, whose ratio is the mean of t independent lognormal numbers. In k of T rounds it
costs no more than k times in one of ``floor(T / k)`` (Feldman and Shenfeld 2025).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar

import numpy as np
from scipy.special import gammaln, logsumexp, ndtr

from fedsim.errors import FedsimError
from fedsim.privacy.laws.base import Law, Participation
from fedsim.privacy.laws.sampler import Ids, RememberingSampler, declared_population
from fedsim.privacy.losses import (
    ORDERS,
    RELEASE_TAIL,
    Array,
    AtomicPair,
    DominatingPair,
    Reversed,
    SampledGaussian,
    gaussian_rdp,
)
from fedsim.randomness import Draws
from fedsim.registry import register
from fedsim.settings import Doc, Ge

STEPS_PER_STD = 40
MOST_POINTS = 4096
REACH = 9.0
"""Standard deviations to which lognormal numbers are put on a grid; beyond, losses are infinite."""
MOST_MOMENT = 64


@dataclass(frozen=True, kw_only=True)
class AllocationLaw(Law):
    """Each row is in ``participations`` of ``rounds`` rounds, all choices being equally likely.

    With ``blocks`` it is in one of each ``rounds / participations`` rounds in a row, and the cost
    is exactly that of the parts; else these are an upper bound.

    An event of it is one of ``participations`` equal parts of the plan.
    """

    name: ClassVar[str] = "allocation"
    participations: int = 1
    rounds: int = 1
    blocks: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.participations <= self.rounds:
            raise FedsimError(
                f"participations is {self.participations}; it must be from 1 to the rounds, "
                f"{self.rounds}."
            )
        if self.blocks and self.rounds % self.participations:
            raise FedsimError(
                f"participations is {self.participations}; with blocks it must divide the rounds, "
                f"{self.rounds}."
            )

    @property
    def rate(self) -> float:
        """Of being in a given round."""
        return self.participations / self.rounds

    @property
    def among(self) -> int:
        """Rounds of which a row is in one, in each part."""
        return self.rounds // self.participations

    def gaussian(self, noise_multiplier: float) -> float | None:
        """One plain Gaussian, where a part has one round only."""
        return 1 / noise_multiplier if self.among == 1 else None

    def pairs(self, noise_multiplier: float) -> tuple[DominatingPair, DominatingPair]:
        """Of one part; both directions, upper bounds within some 1 %."""
        if self.among == 1:
            return SampledGaussian(1.0, noise_multiplier).both
        pair = AllocatedGaussian(self.among, noise_multiplier)
        return pair, Reversed(pair)

    def rdp(self, noise_multiplier: float) -> Array:
        """Rényi curve of one part, an upper bound on both directions."""
        return allocation_rdp(self.among, noise_multiplier)

    def inclusion(self, population: int) -> None:
        """None: rounds of one client are not drawn independently."""

    @property
    def label(self) -> str:
        """A few words for a table."""
        return f"{self._words} rounds, at random"

    @property
    def _words(self) -> str:
        return (
            f"one of each {self.among:,}"
            if self.blocks
            else f"{self.participations:,} of {self.rounds:,}"
        )

    def sentence(self, row: str) -> str:
        """How a ``row`` is drawn, for a statement."""
        return f"each {row} in {self._words} rounds (random allocation: in which must stay secret)"

    def round_sentence(self, population: int) -> str:
        """Which clients take part in a round, for a report."""
        return (
            f"Every client takes part in {self._words} rounds, drawn at random: about "
            f"{self.rate * population:,.4g} of {population:,} in a round."
        )


@dataclass(frozen=True)
class AllocatedGaussian(AtomicPair):
    """A row in one of ``among`` rounds, removed, at noise multiplier z.

    The ratio of the two densities is ``S``, a mean of lognormal numbers. It is put on a grid of
    log S, term by term: what falls between two points goes to both, so that the mean stays. That
    spreads S, and pairs are ordered by how spread their ratios are (Blackwell 1951): the result
    dominates, in both directions and under composition.
    """

    among: int
    noise_multiplier: float

    def ends(self) -> tuple[float, float]:
        """The least and the largest finite loss, but for negligible mass."""
        losses, upper, lower = self._atoms()
        (inside,) = np.nonzero(
            (np.cumsum(upper + lower) > RELEASE_TAIL)
            & (np.cumsum((upper + lower)[::-1])[::-1] > RELEASE_TAIL)
        )
        return float(losses[inside[0]]), float(losses[inside[-1]])

    def masses(self, grid: Array) -> tuple[Array, Array]:
        """Mass of ``upper`` and ``lower`` at losses below, between and above the grid's points."""
        places = np.searchsorted(grid, self._atoms()[0])
        upper, lower = self._sums(places, len(grid) + 1)
        # What is missing of each lies at infinite losses.
        upper[-1] += max(0.0, 1.0 - float(upper.sum()))
        lower[0] += max(0.0, 1.0 - float(lower.sum()))
        return upper, lower

    def _atoms(self) -> tuple[Array, Array, Array]:
        losses, lower = _mean_of_lognormals(self.among, self.noise_multiplier)
        return losses, lower * np.exp(losses), lower


@lru_cache(maxsize=32)
def _mean_of_lognormals(
    among: int, noise_multiplier: float, *, capped: bool = False
) -> tuple[Array, Array]:
    """log S on a grid, and its mass; what is missing of the mass is at S = 0.

    S is the mean of ``among`` numbers ``exp(x / z^2 - 1 / (2 z^2))``, x normal of deviation z.
    ``capped``, a number above the grid is the grid's last point instead: S is then too small, and
    never 0.
    """
    z = noise_multiplier
    low = -1 / (2 * z**2) - REACH / z - math.log(among)
    high = 1 / (2 * z**2) + REACH / z
    # The standard deviation of S is sqrt((e^(1/z^2) - 1) / t).
    spread = math.sqrt(math.log1p(math.expm1(min(1 / z**2, 700.0)) / among))
    step = max(min(spread, 1 / z) / STEPS_PER_STD, (high - low) / MOST_POINTS)
    points = math.ceil((high - low) / step) + 1
    grid: Array = low + step * np.arange(points, dtype=np.float64)
    term = _split_lognormal(grid + math.log(among), z)
    if capped:
        term[-1] += 1 - term.sum()
    result, doubled = None, term
    for bit in bin(among)[:1:-1]:
        if bit == "1":
            result = doubled if result is None else _sum(result, doubled, step)
        if among.bit_length() > 1:
            doubled = _sum(doubled, doubled, step)
    assert result is not None
    return grid, result


def _split_lognormal(log_values: Array, z: float) -> Array:
    """Mass of one number at points of its logarithm, what is between two going to both.

    What is above the last point is left out of the mass, as S = 0: its part of the mean is then at
    an infinite loss.
    """
    below = (log_values + 1 / (2 * z**2)) * z
    mass, weighted = (np.diff(ndtr(points)) for points in (below, below - 1 / z))
    values = np.exp(log_values)
    to_right = np.clip((weighted - mass * values[:-1]) / np.diff(values), 0.0, mass)
    atoms = np.zeros(len(values))
    atoms[:-1] += mass - to_right
    atoms[1:] += to_right
    # Between 0 and the first point.
    atoms[0] += float(ndtr(below[0] - 1 / z)) / values[0]
    return atoms


def _sum(one: Array, other: Array, step: float) -> Array:
    """Law of the sum of two independent numbers with these masses on one grid of logarithms.

    What is missing of a mass is at 0.
    """
    points = len(one)
    total = np.zeros(2 * points)
    offsets = np.arange(points)
    # A sum of numbers k steps apart lies c_k steps above the larger one, and a part f_k further.
    larger = np.log1p(np.exp(-step * offsets)) / step
    steps = np.floor(larger + 1e-12).astype(int)
    part = np.expm1((larger - steps) * step) / math.expm1(step)
    part = np.clip(part, 0.0, 1.0)
    for k in range(points):
        both = one[: points - k] * other[k:]
        if k:
            both += other[: points - k] * one[k:]
        start = k + int(steps[k])
        total[start : start + len(both)] += (1 - part[k]) * both
        total[start + 1 : start + 1 + len(both)] += part[k] * both
    total[:points] += (1 - one.sum()) * other + (1 - other.sum()) * one
    # The grid ends where S does not go: what is above keeps its part of the mean as infinite loss.
    return total[:points]


@lru_cache(maxsize=256)
def allocation_rdp(among: int, noise_multiplier: float) -> Array:
    """RDP at `ORDERS` of a row in one of so many rounds, an upper bound on both directions."""
    z = noise_multiplier
    # Removed: E S^m for whole m, by the powers of the exponential series of one number's moments.
    m = np.arange(MOST_MOMENT + 1)
    series = m * (m - 1) / (2 * z**2) - gammaln(m + 1)
    power = np.where(m == 0, 0.0, -np.inf)
    for bit in bin(among)[2:]:
        power = _product(power, power)
        if bit == "1":
            power = _product(power, series)
    cumulants = power + gammaln(m + 1) - m * math.log(among)
    # Convex in the order, so that chords are upper bounds.
    chord = np.interp(ORDERS, m[1:], cumulants[1:], right=np.inf)
    removed = np.minimum(chord / (ORDERS - 1), gaussian_rdp(1 / z))
    # Added: the mean is no less than the geometric mean; or by the grid, whose S is more spread.
    added = 1 / (2 * z**2) + (ORDERS - 1) / (2 * among * z**2)
    losses, lower = _mean_of_lognormals(among, z, capped=True)
    (some,) = np.nonzero(lower > 0)
    logs = np.log(lower[some])
    on_grid = [logsumexp((1 - order) * losses[some] + logs) / (order - 1) for order in ORDERS]
    added = np.minimum(added, on_grid)
    return np.asarray(np.maximum(removed, added))


def _product(one: Array, other: Array) -> Array:
    """Product of two power series with these logarithms of coefficients, as long as they are."""
    size = len(one)
    return np.array([logsumexp(one[: n + 1] + other[n::-1]) for n in range(size)])


@register("cohort", "allocation")
@dataclass(frozen=True)
class Allocation(RememberingSampler):
    """Each client takes part in exactly so many rounds of the plan, at random.

    Guarantee: add-remove or zero-out, for the plan as a whole: it is charged before its first
    round. The number of those in a round is random, and no client moves another.

    Parameters
    ----------
    participations : int
        k, from 1 to the rounds.
    rounds : int
        T, of the plan; it cannot be changed later on.
    blocks : bool
        Whether a client is in one of each T / k rounds in a row, at the same cost.
    population : int or None
        Declared public number.
    """

    name: ClassVar[str] = "allocation"
    participations: Annotated[
        int, Ge(1), Doc("In how many of the run's rounds each client takes part.")
    ] = 1
    rounds: int = 1
    population: int | None = None
    blocks: Annotated[
        bool,
        Doc("Whether a client takes part once in each of `participations` equal parts of the run."),
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.participations > self.rounds:
            raise FedsimError(
                f"cohort.participations is {self.participations}; it must be at most the run's "
                f"rounds, {self.rounds}."
            )
        if self.blocks and self.rounds % self.participations:
            raise FedsimError(
                f"cohort.participations is {self.participations}; with cohort.blocks it must "
                f"divide the run's rounds, {self.rounds}."
            )

    def draw(self, round: int, draws: Draws, step: int = 0) -> Ids:
        """Sorted ids; rounds are drawn in turn.

        Raises
        ------
        FedsimError
            If the round is not the next one of the plan.
        """
        if not self.memory:
            left = np.full(declared_population(self), self.participations)
            self.memory.update(round=0, left=left)
        if round != self.memory["round"] + 1 or round > self.rounds:
            raise FedsimError(
                f"round {round} follows round {self.memory['round']} of a random allocation; its "
                f"{self.rounds} rounds must be drawn once each, in turn."
            )
        left = self.memory["left"]
        length = self.rounds // self.participations if self.blocks else self.rounds
        before = (round - 1) % length
        if self.blocks and not before:
            left[:] = 1
        # With r of the rounds that are left to be drawn, each is as likely as any other.
        numbers = draws.generator(round, step).random(len(left))
        ids: Ids = np.flatnonzero(numbers * (length - before) < left)
        left[ids] -= 1
        self.memory["round"] = round
        return ids

    def law(self) -> AllocationLaw:
        """So many of all rounds."""
        return AllocationLaw(
            participations=self.participations,
            rounds=self.rounds,
            blocks=self.blocks,
            population=self.population,
        )

    def gaussians(self, count: int) -> int:
        """As many parts as participations, whatever the sums of a round."""
        return self.participations

    def participation(self, rounds: int) -> Participation:
        """Any rounds, but no more than the participations."""
        return Participation(rounds, most=self.participations)
