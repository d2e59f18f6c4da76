"""Full participation, and its law: a plain Gaussian without amplification."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np

from fedsim.array_types import Floats, Ints
from fedsim.privacy.laws.base import Adjacency, Law, WrappingLaw
from fedsim.privacy.laws.sampler import Sampler, declared_population
from fedsim.randomness import Draws
from fedsim.registry import register


@dataclass(frozen=True, kw_only=True)
class FullLaw(Law):
    """Law of one plain Gaussian, with no amplification.

    With a fixed denominator it is valid for every adjacency, each at its own sensitivity.
    """

    name: ClassVar[str] = "full"
    neighbours: ClassVar[tuple[Adjacency, ...]] = ("zero-out", "add-remove", "replace-one")
    label: ClassVar[str] = "everybody, no amplification"
    adjacency: Adjacency = "zero-out"

    def group_sampling(self, size: int) -> Floats:
        """Probability 1 that all ``size`` rows are included."""
        return np.asarray(np.eye(size + 1)[size])

    def sentence(self, row: str) -> str:
        """How a ``row`` is sampled: a phrase of the privacy statement."""
        return "full participation (no amplification by sampling)"

    def round_sentence(self, population: int) -> str:
        """Which clients take part in a round: a sentence for reports."""
        return "Every client takes part in every round."


def unamplified(law: Law) -> Law:
    """Law of the same rounds for an adversary who knows which rows were sampled.

    An event of it covers as many rounds as one of ``law``, or a single one (`one_gaussian`).
    """
    if isinstance(law, WrappingLaw):
        base = unamplified(law.base)
        return replace(law, base=base, adjacency=base.adjacency)
    return law.known_sample_law or one_gaussian(law)


def one_gaussian(law: Law) -> FullLaw:
    """Law of a single round, without amplification, for the neighbours of ``law``."""
    replaced = law.adjacency == "replace-one"
    adjacency: Adjacency = "replace-one" if replaced else "zero-out"
    return FullLaw(adjacency=adjacency, population=law.population)


@register("cohort", "full")
@dataclass(frozen=True)
class Full(Sampler):
    """Every client in every round: no amplification, and the exact Gaussian curve.

    Parameters
    ----------
    population : int or None
        Number of clients: declared, public. Accounting alone does not need it.
    adjacency : "zero-out" (default) or "replace-one"
        Zero-out replaces one row by zeros; replace-one replaces it by any other row, which moves
        the sum by up to twice the clip norm.
    """

    name: ClassVar[str] = "full"
    population: int | None = None
    adjacency: Literal["zero-out", "replace-one"] = field(default="zero-out", kw_only=True)

    @property
    def steps(self) -> int:
        """Batches in one pass over the rows: always 1."""
        return 1

    def order(self, round: int, draws: Draws, number: int) -> Ints:
        """All ids, in ascending order, without random numbers (see `ShuffledPasses.order`)."""
        return np.arange(declared_population(self), dtype=np.int64)

    def draw(self, round: int, draws: Draws, step: int = 0) -> Ints:
        """All ids, without random numbers."""
        return self.order(round, draws, step)

    def law(self) -> FullLaw:
        """A plain Gaussian, without amplification."""
        return FullLaw(population=self.population, adjacency=self.adjacency)
