"""Shuffled passes (epochs): all rows in random order, cut into batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedsim.array_types import Ints
from fedsim.errors import FedsimError
from fedsim.privacy.laws.full import Full, FullLaw
from fedsim.privacy.laws.sampler import Sampler, check_population, declared_population
from fedsim.randomness import Draws


@dataclass(frozen=True, kw_only=True)
class ShuffleLaw(FullLaw):
    """Law of one pass: a plain Gaussian, since each row is in one batch, which is not secret."""

    name: ClassVar[str] = "shuffle"
    label: ClassVar[str] = "shuffled passes, no amplification"

    def inclusion(self, population: int) -> None:
        """None: batches of one pass are not independent."""

    def sentence(self, row: str) -> str:
        """How a ``row`` is sampled: a phrase of the privacy statement."""
        return "shuffled passes (one unamplified release a pass)"


@dataclass(frozen=True)
class ShuffledPasses(Sampler):
    """Passes over all rows in random order, cut into batches; a pass's last batch may be short.

    Guarantee: zero-out. Each row is in one batch of a pass, so that a pass costs one Gaussian. No
    amplification by shuffling is credited.

    Parameters
    ----------
    batch_size : int
        Rows in a batch, in [1, population].
    population : int
        Number of rows: declared, public.
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
        """The batch size, even where a pass's last batch is short."""
        return float(self.batch_size)

    @property
    def steps(self) -> int:
        """Batches in one pass."""
        return -(-self.population // self.batch_size)

    def order(self, round: int, draws: Draws, number: int) -> Ints:
        """All ids in the order of pass ``number`` of a round; batches are its consecutive parts."""
        return draws.generator(round, number).permutation(self.population)

    def draw(self, round: int, draws: Draws, step: int = 0) -> Ints:
        """Ids of one batch; where whole passes are needed, `order` is cheaper."""
        number, batch = divmod(step, self.steps)
        first = batch * self.batch_size
        return self.order(round, draws, number)[first : first + self.batch_size]

    def law(self) -> ShuffleLaw:
        """One plain Gaussian for each pass, without amplification."""
        return ShuffleLaw()

    def gaussians(self, count: int) -> int:
        """Number of passes that ``count`` batches begin, complete or not."""
        return -(-count // self.steps)


def draw_passes(
    sampler: ShuffledPasses | Full, draws: Sequence[Draws], round: int, passes: int
) -> Ints:
    """Orders of passes 0 to ``passes - 1`` for n clients: int64 ``[n, passes, population]``.

    The result equals that of `ShuffledPasses.order` for each pass, in a third of the time.
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
