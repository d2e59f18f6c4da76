"""Everybody, every time; and the law of a plain Gaussian without amplification."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from fedsim.privacy.laws.base import Adjacency, Law
from fedsim.privacy.laws.sampler import Ids, Sampler, declared_population
from fedsim.privacy.losses import Array
from fedsim.randomness import Draws
from fedsim.registry import register


@dataclass(frozen=True, kw_only=True)
class FullLaw(Law):
    """One plain Gaussian: with a fixed denominator every relation is valid, at its sensitivity."""

    name: ClassVar[str] = "full"
    neighbours: ClassVar[tuple[Adjacency, ...]] = ("zero-out", "add-remove", "replace-one")
    label: ClassVar[str] = "everybody, no amplification"
    adjacency: Adjacency = "zero-out"

    def together(self, size: int) -> Array:
        """All of them."""
        return np.asarray(np.eye(size + 1)[size])

    def sentence(self, row: str) -> str:
        """How a ``row`` is drawn, for a statement."""
        return "full participation (no amplification by sampling)"

    def round_sentence(self, population: int) -> str:
        """Which clients take part in a round, for a report."""
        return "Every client takes part in every round."


def unamplified(law: Law) -> FullLaw:
    """What a Gaussian law costs against an adversary who knows who was drawn."""
    replaced = law.adjacency == "replace-one"
    return FullLaw(adjacency="replace-one" if replaced else "zero-out")


@register("cohort", "full")
@dataclass(frozen=True)
class Full(Sampler):
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

    def law(self) -> FullLaw:
        """No sampling, and no amplification."""
        return FullLaw(population=self.population, adjacency=self.adjacency)
