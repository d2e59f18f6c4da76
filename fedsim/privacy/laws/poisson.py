"""Independent draws: Poisson sampling, and samplers with one inclusion probability per row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from fedsim.arguments import check_arguments
from fedsim.array_types import Bools, Floats, Ints
from fedsim.errors import FedsimError
from fedsim.privacy.laws.base import Adjacency, Law
from fedsim.privacy.laws.full import Full
from fedsim.privacy.laws.sampler import Sampler, check_population, declared_population
from fedsim.privacy.losses import (
    ORDERS,
    DominatingPair,
    SampledGaussian,
    gaussian_rdp,
    without_warnings,
)
from fedsim.randomness import Draws
from fedsim.registry import register
from fedsim.settings import Ge, Gt, Le

# Standard deviations above the expected sample size for which gaps are drawn at first.
GAP_DEVIATIONS = 4.0


@dataclass(frozen=True, kw_only=True)
class PoissonLaw(Law):
    """Law of Poisson sampling: each row is sampled independently, with probability ``rate``."""

    name: ClassVar[str] = "poisson"
    neighbours: ClassVar[tuple[Adjacency, ...]] = ("add-remove", "zero-out")
    flower_method: ClassVar[str] = "POISSON"
    rate: Annotated[float, Gt(0), Le(1)] = 1.0
    adjacency: Adjacency = "add-remove"

    def pairs(self, noise_multiplier: float) -> tuple[DominatingPair, DominatingPair]:
        """Dominating pairs for removing and for adding a row; exact (Zhu, Dong & Wang 2022)."""
        return SampledGaussian(self.rate, noise_multiplier).both_directions

    def rdp(self, noise_multiplier: float) -> Floats:
        """Rényi curve at `ORDERS`."""
        return poisson_rdp(self.rate, noise_multiplier)

    def group_sampling(self, size: int) -> Floats:
        """Binomial probabilities that 0, 1, ... ``size`` of ``size`` given rows are sampled."""
        from scipy.stats import binom  # takes half a second, and only groups need it

        return np.asarray(binom.pmf(np.arange(size + 1), size, self.rate))

    def with_sample_size(self, size: float, population: int) -> PoissonLaw:
        """The same kind of law, for samples of expected ``size`` out of ``population``."""
        rate = size / population
        return PoissonLaw(rate=rate, population=population, adjacency=self.adjacency)

    @property
    def label(self) -> str:
        """Short description, for tables."""
        return f"Poisson, rate {self.rate:.6g}"

    def sentence(self, row: str) -> str:
        """How a ``row`` is sampled: a phrase of the privacy statement."""
        return f"Poisson sampling (each {row} independently)"

    def round_sentence(self, population: int) -> str:
        """Which clients take part in a round: a sentence for reports."""
        return (
            f"In each round every client takes part with probability {self.rate:g}, independently "
            f"of the others: about {round(self.rate * population, 1):,.6g} of them."
        )

    @classmethod
    def from_options(cls, **options: Any) -> PoissonLaw:
        """Build it from the command line's options; size and population may replace the rate."""
        size, population = options.pop("size", None), options.get("population")
        if size is not None and options.get("rate") is not None:
            raise FedsimError(
                f"--rate and --size are {options['rate']} and {size}; give one of them, as rate = "
                "size / population."
            )
        if options.get("rate") is None:
            if size is None or population is None:
                raise FedsimError("--sampling poisson needs --rate, or --size and --population.")
            options["rate"] = size / population
        return super().from_options(**options)


@lru_cache(maxsize=4096)
def poisson_rdp(rate: float, noise_multiplier: float) -> Floats:
    """RDP of a Poisson-sampled Gaussian at `ORDERS`, add-remove."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(ORDERS)
    with without_warnings():
        accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(noise_multiplier)))
    # Rounding errors of the series may make a tiny curve negative, which would pass for a perfect
    # guarantee. A Gaussian whose mean is moved by the rate never costs more than sampling does.
    return np.asarray(np.maximum(accountant.rdp, gaussian_rdp(rate / noise_multiplier)))


@register("cohort", "poisson")
@dataclass(frozen=True)
class Poisson(Sampler):
    """Each client is sampled with probability ``rate``, independently of all others.

    Guarantee: add-remove, with the full amplification by sampling; or zero-out, where the
    population is public anyway, as a client's number of examples is. The sample's size is
    Binomial(population, rate), is private, and may be 0. One more row, with the highest id, leaves
    the draws of all others unchanged.

    Parameters
    ----------
    rate : float
        Probability of being sampled, in (0, 1].
    population : int or None
        Number of rows: declared, public. Accounting alone does not need it.
    adjacency : "add-remove" (default) or "zero-out"
    """

    name: ClassVar[str] = "poisson"
    rate: Annotated[float, Ge(1e-9), Le(1.0)] = 0.1
    """The sampling rate: the probability of each client being in a round. Smaller rates cost less
    privacy."""
    population: int | None = None
    adjacency: Literal["add-remove", "zero-out"] = field(default="add-remove", kw_only=True)

    def draw(self, round: int, draws: Draws, step: int = 0) -> Ints:
        """Sorted ids, from geometric gaps between them: time is proportional to the sample."""
        if self.rate == 1:
            return np.arange(declared_population(self), dtype=np.int64)
        ids, included = draw_poisson([self], [draws], round, [range(step, step + 1)])
        return ids[included]

    def law(self) -> PoissonLaw:
        """Poisson sampling at ``rate``."""
        return PoissonLaw(rate=self.rate, population=self.population, adjacency=self.adjacency)


def draw_poisson(
    samplers: Sequence[Poisson | Full], draws: Sequence[Draws], round: int, steps: Sequence[range]
) -> tuple[Ints, Bools]:
    """`Poisson.draw` for several steps of each of n clients, in a third of the time.

    Parameters
    ----------
    samplers, draws : sequences of n
        Each client's sampler of batches, and its keyed random numbers.
    round : int
    steps : sequence of n ranges
        Steps to draw for each client; S is the length of the longest range.

    Returns
    -------
    ids : int64 ``[n, S, w]``
        Sorted ids of each client and step, padded with zeros at the end.
    drawn : bool ``[n, S, w]``
        True at ids, False at padding.
    """
    population = np.array([declared_population(sampler) for sampler in samplers])[:, None, None]
    expected = max(sampler.expected_size for sampler in samplers)
    # The width may depend on the other clients in the block: a generator gives the same first
    # gaps for any number requested, so that no sample depends on it.
    width = int(expected + GAP_DEVIATIONS * math.sqrt(expected)) + 4
    # float64, because sums of gaps may overflow int64. Only sums up to the population count, and
    # integers below 2^53 are exact. Infinity marks the steps that a client does not have.
    gaps = np.full((len(samplers), max(map(len, steps)), width), np.inf)
    for sampler, owner_draws, owner_steps, rows in zip(samplers, draws, steps, gaps, strict=True):
        if sampler.rate == 1:
            rows[: len(owner_steps)] = 1
            continue
        for row, generator in zip(rows, owner_draws.generators(round, owner_steps), strict=False):
            row[:] = generator.geometric(sampler.rate, width)
    numbers = gaps.cumsum(axis=2)
    while (short := numbers[:, :, -1:] <= population).any():
        # Some sample may not have reached its last id. A keyed generator starts from its address
        # again, so that its first `have` gaps repeat those used, and the next are appended. With
        # system entropy all are fresh; independent gaps of the same distribution serve as well.
        have = numbers.shape[2]
        further = np.full_like(numbers, np.inf)
        for owner, step in np.argwhere(short[:, :, 0]).tolist():
            rate, number = samplers[owner].rate, steps[owner][step]
            generator = draws[owner].for_replay().generator(round, number)
            further[owner, step] = generator.geometric(rate, 2 * have)[have:]
        numbers = np.concatenate([numbers, numbers[:, :, -1:] + further.cumsum(axis=2)], axis=2)
    included = numbers <= population
    return np.where(included, numbers - 1, 0).astype(np.int64), included


_DERIVED = frozenset(
    ("draw", "event", "law", "gaussians", "participation", "rate", "adjacency", "_probabilities")
)


class InclusionSampler(Sampler):
    """Base of samplers that include each row independently, with its own public probability.

    A subclass defines `probabilities` and nothing else. Draw and law follow from them, and an
    audit can compare inclusion frequencies with them: of rows, of pairs of rows, over rounds.

    Guarantee: add-remove, at the cost of Poisson sampling at rate ``highest``. No probability may
    depend on private data.

    Parameters
    ----------
    population : int
        Number of rows: declared, public.
    highest : float
        Upper bound on all probabilities of all rounds, in (0, 1]; the rate that is charged.
    """

    name: ClassVar[str] = "inclusion"

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # A mixin that precedes this class in the method resolution order overrides as well.
        nearer = cls.__mro__[: cls.__mro__.index(InclusionSampler)]
        derived = _DERIVED & {name for definition in nearer for name in vars(definition)}
        if derived:
            raise FedsimError(
                f"{cls.__name__} defines {', '.join(sorted(derived))}; an InclusionSampler defines "
                "its probabilities only, and the rest follows from them."
            )

    @check_arguments
    def __init__(self, population: int, highest: float) -> None:
        check_population(population)
        if not 0 < highest <= 1:
            raise FedsimError(f"the highest probability is {highest}; it must lie in (0, 1].")
        self.population, self.highest = population, highest

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.population}, {self.highest})"

    def probabilities(self, round: int) -> npt.NDArray[np.float64]:
        """Inclusion probability of each row in this round, public, ``[population]``."""
        raise NotImplementedError

    @property
    def expected_size(self) -> float:
        """Sum of the first round's probabilities, used in every round (a fixed denominator)."""
        return float(self._probabilities(1).sum())

    def draw(self, round: int, draws: Draws, step: int = 0) -> Ints:
        """Sorted ids, by thinning a Poisson sample at the highest probability."""
        # Two addresses a step: even parts for the candidates, odd ones for thinning them.
        candidates = Poisson(self.highest, self.population).draw(round, draws, 2 * step)
        numbers = draws.generator(round, 2 * step + 1).random(len(candidates))
        return candidates[numbers * self.highest < self._probabilities(round)[candidates]]

    def law(self) -> PoissonLaw:
        """Poisson sampling at the highest probability."""
        return PoissonLaw(rate=self.highest, population=self.population)

    def _probabilities(self, round: int) -> npt.NDArray[np.float64]:
        """`probabilities`, after checking that the law's charge covers them."""
        p = np.asarray(self.probabilities(round), dtype=np.float64)
        if p.shape != (self.population,) or not ((p >= 0) & (p <= self.highest)).all():
            raise FedsimError(
                f"the probabilities of round {round} must be {self.population} numbers in "
                f"[0, {self.highest:g}], since the event charges the highest."
            )
        return p
