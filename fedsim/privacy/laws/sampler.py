"""What a sampler is: which rows are sampled, with the law that says what that costs.

A sampler draws and gives its law, so that accounting and drawing cannot disagree. One type serves
both levels: a cohort of clients is a sample of the population, a batch one of a client's examples.
A draw is a function of its round's keyed random numbers, and of the sampler's state, if it has any;
its time is proportional to what it draws.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fedsim.arguments import check_arguments
from fedsim.errors import FedsimError
from fedsim.privacy.laws.base import Adjacency, Law, Participation
from fedsim.randomness import Draws
from fedsim.settings import check_settings

Ids = npt.NDArray[np.int64]

SamplerState = Mapping[str, Any]
"""Names to numpy arrays and to what JSON can say."""


class Sampler(ABC):
    """Which rows are sampled, and what that costs. All fields are public information.

    One of your own is *declared by the user* in ledger and statement: it is not checked that its
    law is true of its draws. Where rows are in independently of each other, derive it from
    `fedsim.cohorts.InclusionSampler`: its law then follows from its probabilities.
    """

    name: ClassVar[str]
    """As in a config's ``cohort.name``."""

    population: int | None
    """Declared public number of those who may be drawn."""

    def __post_init__(self) -> None:
        check_settings(self, "cohort.")
        check_population(self.population)

    @property
    def rate(self) -> float:
        """Mean probability of any one being drawn, in (0, 1]."""
        return self.law().rate

    @property
    def adjacency(self) -> Adjacency:
        """Which neighbouring populations the law is about."""
        return self.law().adjacency

    @property
    def expected_size(self) -> float:
        """``rate * population``: the denominator of a private mean.

        Raises
        ------
        FedsimError
            If no population was declared: clients that were reached must not stand in for it.
        """
        return self.rate * declared_population(self)

    @property
    def horizon(self) -> int | None:
        """How many rounds its draws are made for, so that none may follow; None for any number.

        By default the setting ``rounds`` of a sampler that has it: a config fills it in.
        """
        rounds: int | None = getattr(self, "rounds", None)
        return rounds

    @abstractmethod
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

    @abstractmethod
    def law(self) -> Law:
        """What one draw costs."""

    def participation(self, rounds: int) -> Participation:
        """In which of so many rounds a row can be; by default in any."""
        return Participation(rounds)

    def gaussians(self, count: int) -> int:
        """How often the law applies to any one row in ``count`` sums, of steps 0 to count - 1."""
        return count

    def state(self) -> SamplerState:
        """What later draws need of earlier ones; most samplers need nothing."""
        return {}

    def restore(self, state: SamplerState) -> None:
        """Continue from what `state` gave, perhaps in another process."""
        if state:
            raise FedsimError(
                f"the state holds {', '.join(sorted(state))} of a sampler, but "
                f"{type(self).__name__} remembers nothing; it must be of a run with this cohort."
            )


@dataclass(frozen=True)
class RememberingSampler(Sampler):
    """A sampler whose draws depend on earlier draws.

    Attributes
    ----------
    memory : dict of str to int64 arrays and int
        Filled by the first draw and changed by each; a checkpoint has all of it.
    """

    memory: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def state(self) -> SamplerState:
        """The memory; empty before the first draw."""
        return {name: np.copy(value) for name, value in self.memory.items()}

    def restore(self, state: SamplerState) -> None:
        """Continue from what `state` gave, perhaps in another process."""
        self.memory.clear()
        self.memory.update({n: np.array(value, dtype=np.int64) for n, value in state.items()})


@check_arguments
def check_population(population: int | None) -> None:
    """Refuse a population below 1."""
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
