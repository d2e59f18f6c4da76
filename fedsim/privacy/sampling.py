"""What a sampler is: who is in (clients of a round, examples of a batch), and what it costs.

Sampling and accounting are one object and cannot disagree. One type serves both levels: a
cohort of clients is a sample of the population, a batch one of a client's examples. A draw
is a function of the keyed numbers of its round, and of what the sampler remembers of earlier
ones, if it remembers any; it costs as much as it draws.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fedsim.errors import FedsimError
from fedsim.privacy.events import Adjacency, Event
from fedsim.randomness import Draws

__all__ = [
    "Ids",
    "Sampler",
    "SamplerDefaults",
    "SamplerState",
    "check_population",
    "declared_population",
]

Ids = npt.NDArray[np.int64]

SamplerState = Mapping[str, Any]
"""Names to numpy arrays and to what JSON can say."""


class Sampler(Protocol):
    """Who is in, and what it costs. All fields are public information.

    One of your own is *declared by the user* in ledger and statement: nobody has checked that
    its event is true of its draws. Where rows are in independently of each other, derive it from
    `fedsim.cohorts.InclusionSampler`: its event then follows from its probabilities. Otherwise
    `SamplerDefaults` has all but what is special to it.
    """

    @property
    def name(self) -> str:
        """As in a config's ``cohort.name``."""

    @property
    def population(self) -> int | None:
        """Declared public number of those who may be drawn."""

    @property
    def rate(self) -> float:
        """Mean probability of any one being drawn, in (0, 1]."""

    @property
    def adjacency(self) -> Adjacency:
        """Which neighbouring populations the event is about."""

    @property
    def expected_size(self) -> float:
        """``rate * population``: the denominator of a private mean.

        Raises
        ------
        FedsimError
            If no population was declared: those seen must not stand in for it.
        """

    def draw(self, round: int, draws: Draws, step: int = 0) -> Ids:
        """Ids of those who are in, each at most once.

        Parameters
        ----------
        round : int
            A sampler may follow it: groups in turn, rounds apart, a trace. Rounds are drawn in
            turn.
        draws : Draws
            Gives the generators: ``draws.generator(round, part)``, each address once.
        step : int
            Samples of one round are numbered; a cohort is step 0.

        Raises
        ------
        FedsimError
            If no population was declared.
        """

    def event(
        self,
        noise_multiplier: float,
        *,
        count: int = 1,
        sides: Mapping[str, float] | None = None,
        guarantee: bool = True,
    ) -> Event:
        """What noisy sums over one round's samples cost.

        Parameters
        ----------
        noise_multiplier : float
            Standard deviation of the noise on the sum divided by the clip norm.
        count : int
            Sums, over the samples of steps 0 to ``count - 1``; two releases of the *same*
            sample are ``sides``.
        sides : mapping of name to float
            Noise multipliers of side scalars released from the same samples.
        guarantee : bool
            False for a release that is not private whatever its noise.
        """

    def state(self) -> SamplerState:
        """What it remembers of the rounds drawn so far; empty where it remembers nothing."""

    def restore(self, state: SamplerState) -> None:
        """Draw on from what `state` gave, in another process perhaps."""


class SamplerDefaults(ABC):
    """What most samplers have in common: an event that follows from one law, and no memory."""

    @abstractmethod
    def law(self) -> Event:
        """A noiseless sum over one sample: how it is drawn, from how many, which neighbours."""

    def gaussians(self, count: int) -> int:
        """How many Gaussian mechanisms ``count`` sums are to any one."""
        return count

    def event(
        self,
        noise_multiplier: float,
        *,
        count: int = 1,
        sides: Mapping[str, float] | None = None,
        guarantee: bool = True,
    ) -> Event:
        """The law with this noise, for each of the `gaussians`; see `Sampler.event`."""
        return replace(
            self.law(),
            noise_multiplier=noise_multiplier,
            count=self.gaussians(count),
            sides=sides or {},
            guarantee=guarantee,
        )

    def state(self) -> SamplerState:
        """Nothing."""
        return {}

    def restore(self, state: SamplerState) -> None:
        """There is nothing to take up."""
        if state:
            raise FedsimError(
                f"the state holds {', '.join(sorted(state))} of a sampler, but "
                f"{type(self).__name__} remembers nothing; it must be of a run with this cohort."
            )


def check_population(population: int | None) -> None:
    """Refuse a population of nobody."""
    if population is not None and population < 1:
        raise FedsimError(f"cohort.population is {population}; it must be 1 or more.")


def declared_population(sampler: Sampler) -> int:
    """The population.

    Raises
    ------
    FedsimError
        If none was declared.
    """
    if sampler.population is None:
        raise FedsimError(
            f"the {sampler.name} cohort has no population; draws and the denominator of a private "
            "mean must come from a declared one."
        )
    return sampler.population
