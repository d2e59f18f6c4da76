"""A sampler with a law of its own, and a noise: each is one file, and no line of fedsim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedsim.cohorts import Cohort
from fedsim.privacy import Law
from fedsim.privacy.laws import PoissonLaw
from fedsim.privacy.losses import SampledGaussian
from fedsim.privacy.noise import Noise
from fedsim.privacy.noise.blt import BLT


@dataclass(frozen=True, kw_only=True)
class PairsLaw(Law):
    """Clients in couples, 2 k and 2 k + 1, which come together or not at all.

    To any one of them this is Poisson sampling.
    """

    name = "couples"
    q: float

    @property
    def rate(self):
        return self.q

    def rdp(self, noise_multiplier):
        return PoissonLaw(rate=self.q).rdp(noise_multiplier)

    def pairs(self, noise_multiplier):
        return SampledGaussian(self.q, noise_multiplier).both_directions

    def inclusion(self, population):
        return None  # two of a couple are in together: no probability is of any two

    @property
    def label(self):
        return f"couples, rate {self.q:g}"

    def sentence(self, row):
        return f"couples of {row}s that come together"


@dataclass(frozen=True)
class Couples(Cohort):
    """Draws them."""

    rate: float = 0.25
    population: int | None = None
    name = "couples"

    def draw(self, round, draws, step=0):
        couples = draws.generator(round, step).random(self.population // 2) < self.rate
        return np.flatnonzero(np.repeat(couples, 2))

    def law(self):
        return PairsLaw(q=self.rate, population=self.population)


@dataclass(frozen=True, kw_only=True)
class Louder(Law):
    """Another law, at so many times the noise."""

    name = "louder"
    inner: Law
    factor: float

    @property
    def rate(self):
        return self.inner.rate

    def rdp(self, noise_multiplier):
        return self.inner.rdp(self.factor * noise_multiplier)

    def pairs(self, noise_multiplier):
        return self.inner.pairs(self.factor * noise_multiplier)

    def inclusion(self, population):
        return self.inner.inclusion(population)

    @property
    def label(self):
        return f"{self.inner.label}, {self.factor:g} times the noise"

    def sentence(self, row):
        return f"{self.inner.sentence(row)}, at {self.factor:g} times the noise multiplier"


@dataclass(frozen=True)
class Loud(Noise):
    """More noise than its multiplier says."""

    factor: float = 2.0

    def combine(self, draws, state):
        return self.factor * draws(), state

    def law(self, law):
        return Louder(
            inner=law, factor=self.factor, population=law.population, adjacency=law.adjacency
        )


@dataclass(frozen=True)
class Cancelling(BLT):
    """Noise that is correlated, with coefficients to find, under a name of its own."""

    name: ClassVar[str] = "cancelling"
