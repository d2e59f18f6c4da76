"""Samples of a fixed size without replacement, accounted for under replace-one adjacency."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, ClassVar

import numpy as np

from fedsim.array_types import Floats, Ints
from fedsim.errors import FedsimError
from fedsim.privacy.laws.base import Adjacency, Inclusion, Law
from fedsim.privacy.laws.poisson import PoissonLaw
from fedsim.privacy.laws.sampler import Sampler
from fedsim.privacy.losses import ORDERS, gaussian_rdp, without_warnings
from fedsim.randomness import Draws
from fedsim.registry import register
from fedsim.settings import Ge

# The bound for sampling without replacement is known at integer orders only, and interpolated
# between them. Beyond order 64 it takes more time, and gives a smaller epsilon only where noise is
# so large that epsilon is below about 0.2.
WHOLE_ORDERS = np.arange(2, 65)


@dataclass(frozen=True, kw_only=True)
class FixedSizeLaw(Law):
    """Law of ``size`` rows out of ``population`` without replacement; Rényi accounting only."""

    name: ClassVar[str] = "fixed"
    neighbours: ClassVar[tuple[Adjacency, ...]] = ("replace-one",)
    flower_method: ClassVar[str] = "WITHOUT_REPLACEMENT"
    size: Annotated[int, Ge(1)]
    population: Annotated[int, Ge(1)] = field()  # required here, unlike in the base
    adjacency: Adjacency = "replace-one"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size > self.population:
            raise FedsimError(
                f"size is {self.size}; it must be at most the population, {self.population}."
            )

    @property
    def rate(self) -> float:
        """``size / population``."""
        return self.size / self.population

    def rdp(self, noise_multiplier: float) -> Floats:
        """Rényi curve at `ORDERS`, under replace-one."""
        if (mu := self.gaussian(noise_multiplier)) is not None:
            return gaussian_rdp(mu)
        return fixed_rdp(self.size, self.population, noise_multiplier)

    def inclusion(self, population: int) -> Inclusion:
        """Probabilities that one given row is sampled and that two are, and the sample size."""
        m, n = self.size, population
        return Inclusion(m / n, m * (m - 1) / (n * max(n - 1, 1)), m)

    def as_poisson(self) -> PoissonLaw:
        """Poisson sampling at the same rate, which costs less."""
        return PoissonLaw(rate=self.rate)

    def with_sample_size(self, size: float, population: int) -> FixedSizeLaw:
        """The same kind of law, for samples of expected ``size`` out of ``population``."""
        return FixedSizeLaw(size=int(size), population=population)

    @property
    def label(self) -> str:
        """Short description, for tables."""
        return f"{self.size} of {self.population} without replacement"

    def sentence(self, row: str) -> str:
        """How a ``row`` is sampled: a phrase of the privacy statement."""
        return "samples of a fixed size without replacement"

    def round_sentence(self, population: int) -> str:
        """Which clients take part in a round: a sentence for reports."""
        return f"In each round {self.size} clients take part, drawn without replacement."


@lru_cache(maxsize=4096)
def fixed_rdp(size: int, population: int, noise_multiplier: float) -> Floats:
    """RDP at `ORDERS` of a Gaussian on ``size`` of ``population`` rows, without replacement.

    The adjacency is replace-one. dp-accounting's bound (Wang, Balle & Kasiviswanathan 2019) takes
    the noise in units of the sensitivity under replacement, which is 2C: it is passed z/2, not z.
    """
    from dp_accounting import GaussianDpEvent, NeighboringRelation
    from dp_accounting.dp_event import SampledWithoutReplacementDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(WHOLE_ORDERS, NeighboringRelation.REPLACE_ONE)
    with without_warnings():
        accountant.compose(
            SampledWithoutReplacementDpEvent(
                population, size, GaussianDpEvent(noise_multiplier / 2)
            )
        )
    # (order - 1) * rdp is convex in the order and 0 at order 1, so that a chord between integer
    # orders is an upper bound. Another one, at every order, is the curve of a known sample: mixing
    # over samples, which both neighbours draw alike, makes no two distributions more different.
    cumulants = np.concatenate([[0.0], (WHOLE_ORDERS - 1) * accountant.rdp])
    chord = np.interp(ORDERS, np.concatenate([[1], WHOLE_ORDERS]), cumulants, right=np.inf)
    return np.asarray(np.minimum(chord / (ORDERS - 1), gaussian_rdp(2 / noise_multiplier)))


@register("cohort", "fixed")
@dataclass(frozen=True)
class FixedSize(Sampler):
    """Cohorts of exactly ``size`` clients, drawn uniformly without replacement.

    Guarantee: replace-one only, and expensive: 300 of 3000 clients over 100 rounds at a
    noise multiplier of 1.2104 and delta = 1e-5 cost epsilon 36.9, a Poisson cohort of the
    same expected size 5.0.

    Parameters
    ----------
    size : int
        Clients in a cohort, in [1, population].
    population : int
        Number of clients: declared, public.
    """

    name: ClassVar[str] = "fixed"
    size: Annotated[int, Ge(1)] = 10
    """The size of the cohort."""
    population: int = 0  # refused: a population must be declared

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.size <= self.population:
            raise FedsimError(
                f"cohort.size is {self.size}; it must be from 1 to {self.population}, the "
                "population (partition.clients)."
            )

    @property
    def expected_size(self) -> float:
        """``size``, exactly."""
        return float(self.size)

    def draw(self, round: int, draws: Draws, step: int = 0) -> Ints:
        """Sorted ids, by Floyd's method (Bentley and Floyd 1987)."""
        # One number from 0 to j for each of the last `size` ids j, ascending. If that number is
        # already chosen, j is taken instead: it is larger than all earlier ones, hence free.
        above = np.arange(self.population - self.size + 1, self.population + 1)
        sampled: set[int] = set()
        for number, bound in zip(
            draws.generator(round, step).integers(above).tolist(), above.tolist(), strict=True
        ):
            sampled.add(bound - 1 if number in sampled else number)
        return np.sort(np.fromiter(sampled, dtype=np.int64, count=self.size))

    def law(self) -> FixedSizeLaw:
        """Sampling of ``size`` rows without replacement."""
        return FixedSizeLaw(size=self.size, population=self.population)
