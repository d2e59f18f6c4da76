"""Independent draws: Poisson sampling, and samplers that give each row a probability of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from fedsim.arguments import check_arguments
from fedsim.errors import FedsimError
from fedsim.privacy.laws.base import Adjacency, Law
from fedsim.privacy.laws.full import Full
from fedsim.privacy.laws.sampler import Ids, Sampler, check_population, declared_population
from fedsim.privacy.losses import ORDERS, Array, DominatingPair, SampledGaussian, without_warnings
from fedsim.randomness import Draws
from fedsim.registry import register
from fedsim.settings import Doc, Ge, Le

Drawn = npt.NDArray[np.bool_]

# Standard deviations of a sample's size for which gaps are asked for at once.
SPREAD = 4.0


@dataclass(frozen=True, kw_only=True)
class PoissonLaw(Law):
    """Each row is in with probability ``rate``, independently of all others."""

    name: ClassVar[str] = "poisson"
    neighbours: ClassVar[tuple[Adjacency, ...]] = ("add-remove", "zero-out")
    flower: ClassVar[str] = "POISSON"
    rate: float = 1.0
    adjacency: Adjacency = "add-remove"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.rate <= 1:
            raise FedsimError(f"rate is {self.rate}; it must lie in (0, 1].")

    def pairs(self, noise_multiplier: float) -> tuple[DominatingPair, DominatingPair]:
        """Both directions; exact (Zhu, Dong & Wang 2022)."""
        return SampledGaussian(self.rate, noise_multiplier).both

    def rdp(self, noise_multiplier: float) -> Array:
        """Rényi curve at `ORDERS`."""
        return poisson_rdp(self.rate, noise_multiplier)

    def together(self, size: int) -> Array:
        """Binomial."""
        from scipy.stats import binom  # half a second that no other accounting waits for

        return np.asarray(binom.pmf(np.arange(size + 1), size, self.rate))

    def sampled(self, size: float, population: int) -> PoissonLaw:
        """The same kind of draw, of an expected ``size`` out of ``population``."""
        rate = size / population
        return PoissonLaw(rate=rate, population=population, adjacency=self.adjacency)

    @property
    def label(self) -> str:
        """A few words for a table."""
        return f"Poisson, rate {self.rate:.6g}"

    def sentence(self, row: str) -> str:
        """How a ``row`` is drawn, for a statement."""
        return f"Poisson sampling (each {row} independently)"

    def round_sentence(self, population: int) -> str:
        """Which clients take part in a round, for a report."""
        return (
            f"In each round every client takes part with probability {self.rate:g}, independently "
            f"of the others: about {round(self.rate * population, 1):,.6g} of them."
        )

    @classmethod
    def of_options(cls, **options: Any) -> PoissonLaw:
        """From options of a command line; a size and a population give the rate too."""
        size, population = options.pop("size", None), options.get("population")
        if options.get("rate") is None:
            if size is None or population is None:
                raise FedsimError("--sampling poisson needs --rate, or --size and --population.")
            options["rate"] = size / population
        return super().of_options(**options)


@lru_cache(maxsize=4096)
def poisson_rdp(rate: float, noise_multiplier: float) -> Array:
    """RDP of a Poisson-sampled Gaussian at `ORDERS`, add-remove."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(ORDERS)
    with without_warnings():
        accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(noise_multiplier)))
    return np.asarray(accountant.rdp, dtype=np.float64)


@register("cohort", "poisson")
@dataclass(frozen=True)
class Poisson(Sampler):
    """Everybody is in with probability ``rate``, independently of all others.

    Guarantee: add-remove, with the full amplification by sampling; zero-out where the
    population is public for a reason of its own, as a client's number of examples is. The
    sample's size is Binomial(population, rate), is private, and may be 0. One more row with the
    highest id changes a sample by that row at most.

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

    def draw(self, round: int, draws: Draws, step: int = 0) -> Ids:
        """Sorted ids, by the gaps between them, which are geometric."""
        if self.rate == 1:
            return np.arange(declared_population(self), dtype=np.int64)
        ids, drawn = draw_poisson([self], [draws], round, [range(step, step + 1)])
        return ids[drawn]

    def law(self) -> PoissonLaw:
        """Poisson sampling at the rate."""
        return PoissonLaw(rate=self.rate, population=self.population, adjacency=self.adjacency)


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


_DERIVED = frozenset(
    ("draw", "event", "law", "gaussians", "participation", "rate", "adjacency", "_probabilities")
)


class InclusionSampler(Sampler):
    """Base of samplers that let each row in independently, with a probability of its own.

    A subclass says `probabilities` and nothing else: draw and law follow from them, and an
    audit can hold inclusion frequencies against them, one by one, in pairs and over rounds.

    Guarantee: add-remove, that of Poisson sampling at ``highest``. No probability may depend on
    private data.

    Parameters
    ----------
    population : int
        Declared public number.
    highest : float
        No probability of any round is above it, in (0, 1]: what the law charges.
    """

    name: ClassVar[str] = "inclusion"

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # Of its own, and from classes that stand before this one among its bases.
        nearer = cls.__mro__[: cls.__mro__.index(InclusionSampler)]
        derived = _DERIVED & {name for definition in nearer for name in vars(definition)}
        if derived:
            raise FedsimError(
                f"{cls.__name__} defines {', '.join(sorted(derived))}; an InclusionSampler says "
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
        """Probability of each being in this round, public, ``[population]``."""
        raise NotImplementedError

    @property
    def expected_size(self) -> float:
        """The sum of the first round's probabilities, for every round."""
        return float(self._probabilities(1).sum())

    def draw(self, round: int, draws: Draws, step: int = 0) -> Ids:
        """Sorted ids: a Poisson sample at the highest probability, thinned."""
        candidates = Poisson(self.highest, self.population).draw(round, draws, 2 * step)
        numbers = draws.generator(round, 2 * step + 1).random(len(candidates))
        return candidates[numbers * self.highest < self._probabilities(round)[candidates]]

    def law(self) -> PoissonLaw:
        """Poisson sampling at the highest probability."""
        return PoissonLaw(rate=self.highest, population=self.population)

    def _probabilities(self, round: int) -> npt.NDArray[np.float64]:
        p = np.asarray(self.probabilities(round), dtype=np.float64)
        if p.shape != (self.population,) or not ((p >= 0) & (p <= self.highest)).all():
            raise FedsimError(
                f"the probabilities of round {round} must be {self.population} numbers in "
                f"[0, {self.highest:g}], since the event charges the highest."
            )
        return p
