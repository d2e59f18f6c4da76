"""Samples of a fixed size without replacement, for which replace-one neighbours are known."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar

import numpy as np

from fedsim.errors import FedsimError
from fedsim.privacy.laws.base import Adjacency, Inclusion, Law
from fedsim.privacy.laws.poisson import PoissonLaw
from fedsim.privacy.laws.sampler import Ids, Sampler
from fedsim.privacy.losses import ORDERS, Array, gaussian_rdp, without_warnings
from fedsim.randomness import Draws
from fedsim.registry import register
from fedsim.settings import Doc, Ge

# Sampling without replacement is bounded at whole orders and interpolated between them;
# beyond 64 its bound costs more time than it ever gains.
WHOLE_ORDERS = np.arange(2, 65)


@dataclass(frozen=True, kw_only=True)
class FixedSizeLaw(Law):
    """``size`` of ``population`` without replacement; Rényi accounting is all there is."""

    name: ClassVar[str] = "fixed"
    neighbours: ClassVar[tuple[Adjacency, ...]] = ("replace-one",)
    flower: ClassVar[str] = "WITHOUT_REPLACEMENT"
    size: int | None = None
    adjacency: Adjacency = "replace-one"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size is None or self.population is None:
            raise FedsimError("fixed sampling needs size and population.")
        if not 1 <= self.size <= self.population:
            raise FedsimError(
                f"size is {self.size}; it must lie in [1, population = {self.population}]."
            )

    @property
    def rate(self) -> float:
        """``size / population``."""
        assert self.size is not None
        assert self.population is not None
        return self.size / self.population

    def rdp(self, noise_multiplier: float) -> Array:
        """Rényi curve at `ORDERS`."""
        assert self.size is not None
        assert self.population is not None
        if (mu := self.gaussian(noise_multiplier)) is not None:
            return gaussian_rdp(mu)
        return fixed_rdp(self.size, self.population, noise_multiplier)

    def inclusion(self, population: int) -> Inclusion:
        """Probabilities of one row and of two being in, and the size of a sample."""
        m, n = self.size or 0, population
        return Inclusion(m / n, m * (m - 1) / (n * max(n - 1, 1)), m)

    def as_poisson(self) -> PoissonLaw:
        """Independent draws at the same rate, which cost less."""
        return PoissonLaw(rate=self.rate)

    def sampled(self, size: float, population: int) -> FixedSizeLaw:
        """The same kind of draw, of an expected ``size`` out of ``population``."""
        return FixedSizeLaw(size=int(size), population=population)

    @property
    def label(self) -> str:
        """A few words for a table."""
        return f"{self.size} of {self.population} without replacement"

    def sentence(self, row: str) -> str:
        """How a ``row`` is drawn, for a statement."""
        return "samples of a fixed size without replacement"

    def round_sentence(self, population: int) -> str:
        """Which clients take part in a round, for a report."""
        return f"In each round {self.size} clients take part, drawn without replacement."


@lru_cache(maxsize=4096)
def fixed_rdp(size: int, population: int, noise_multiplier: float) -> Array:
    """RDP at `ORDERS` of a Gaussian on ``size`` of ``population`` without replacement.

    Replace-one. dp-accounting's bound (Wang, Balle & Kasiviswanathan 2019) takes the noise
    in units of the sensitivity of the *change*, which is 2C: it is given z/2, not z.
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
    # (order - 1) * rdp is convex in the order: a chord is an upper bound.
    cumulants = np.concatenate([[0.0], (WHOLE_ORDERS - 1) * accountant.rdp])
    chord = np.interp(ORDERS, np.concatenate([[1], WHOLE_ORDERS]), cumulants, right=np.inf)
    return np.asarray(chord / (ORDERS - 1))


@register("cohort", "fixed")
@dataclass(frozen=True)
class FixedSize(Sampler):
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
        super().__post_init__()
        if not 1 <= self.size <= self.population:
            raise FedsimError(
                f"cohort.size is {self.size}; it must lie in [1, population = {self.population}]."
            )

    @property
    def expected_size(self) -> float:
        """The size itself."""
        return float(self.size)

    def draw(self, round: int, draws: Draws, step: int = 0) -> Ids:
        """Sorted ids, by Floyd's method (Bentley and Floyd 1987)."""
        # One number below j + 1 for each j: if it is taken, j itself is not.
        above = np.arange(self.population - self.size + 1, self.population + 1)
        chosen: set[int] = set()
        for number, bound in zip(
            draws.generator(round, step).integers(above).tolist(), above.tolist(), strict=True
        ):
            chosen.add(bound - 1 if number in chosen else number)
        return np.sort(np.fromiter(chosen, dtype=np.int64, count=self.size))

    def law(self) -> FixedSizeLaw:
        """Sampling without replacement."""
        return FixedSizeLaw(size=self.size, population=self.population)
