"""Passes over everybody in an order of their own, cut into batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedsim.errors import FedsimError
from fedsim.privacy.laws.base import Participation
from fedsim.privacy.laws.full import Full, FullLaw
from fedsim.privacy.laws.sampler import Ids, Sampler, check_population, declared_population
from fedsim.randomness import Draws


@dataclass(frozen=True, kw_only=True)
class ShuffleLaw(FullLaw):
    """One plain Gaussian a pass: each row is in one of its batches, and which is not secret."""

    name: ClassVar[str] = "shuffle"
    label: ClassVar[str] = "shuffled passes, no amplification"

    def inclusion(self, population: int) -> None:
        """None: batches of one pass are not drawn independently."""

    def sentence(self, row: str) -> str:
        """How a ``row`` is drawn, for a statement."""
        return "shuffled passes (one unamplified release a pass)"


@dataclass(frozen=True)
class ShuffledPasses(Sampler):
    """Passes over everybody in an order of their own, cut into batches; the last may be short.

    Guarantee: zero-out. Everybody is in one batch a pass, which costs one Gaussian without
    amplification: the order is not secret enough to be credited.

    Parameters
    ----------
    batch_size : int
        In [1, population].
    population : int
        Declared public number.
    one_order : bool
        Whether all passes of a round go in the order of its first: a row is then in batches that
        are `steps` apart, as noise that is correlated over a round's steps counts on.
    """

    name: ClassVar[str] = "shuffle"
    batch_size: int
    population: int
    one_order: bool = False

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
    def steps(self) -> int:
        """Batches in one pass."""
        return -(-self.population // self.batch_size)

    def order(self, round: int, draws: Draws, number: int) -> Ids:
        """Pass ``number`` of a round: all ids, in the order in which batches take them."""
        return draws.generator(round, 0 if self.one_order else number).permutation(self.population)

    def draw(self, round: int, draws: Draws, step: int = 0) -> Ids:
        """The ids of one batch. `order` gives a pass at a time."""
        number, batch = divmod(step, self.steps)
        first = batch * self.batch_size
        return self.order(round, draws, number)[first : first + self.batch_size]

    def law(self) -> ShuffleLaw:
        """No amplification."""
        return ShuffleLaw()

    def gaussians(self, count: int) -> int:
        """One for each pass that ``count`` sums begin."""
        return -(-count // self.steps)

    def participation(self, rounds: int) -> Participation:
        """A batch of every pass, always the same one in one order."""
        return Participation(rounds, self.steps if self.one_order or rounds <= self.steps else 1)


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
        one_order = isinstance(sampler, ShuffledPasses) and sampler.one_order
        for owner_orders, owner_draws in zip(orders, draws, strict=True):
            generators = owner_draws.generators(round, range(1 if one_order else passes))
            for order, generator in zip(owner_orders, generators, strict=False):
                generator.shuffle(order)
            if one_order:
                owner_orders[1:] = owner_orders[0]
    return orders
