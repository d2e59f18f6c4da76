"""Interface of a sampler: it draws samples of rows and says by its law what a draw costs.

Draws and their cost come from one object, so that accounting and sampling cannot disagree. The
same type serves both levels: a cohort is a sample of the population, a batch a sample of one
client's examples. A draw is a function of the round's keyed random numbers and of the sampler's
state, if it has any. Its time is proportional to the size of the sample.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from fedsim.arguments import check_arguments
from fedsim.array_types import Ints
from fedsim.errors import FedsimError
from fedsim.privacy.laws.base import Adjacency, Law, Participation
from fedsim.randomness import Draws
from fedsim.settings import check_settings

SamplerState = Mapping[str, Any]
"""State by name: numpy arrays and JSON values."""


class Sampler(ABC):
    """Base of samplers: which rows are sampled, and at what cost. All fields are public.

    A sampler of your own is *declared by the user* in ledger and statement: fedsim does not check
    that its law describes its draws. If rows are sampled independently of each other, derive it
    from `fedsim.cohorts.InclusionSampler`, whose law follows from the inclusion probabilities.
    """

    name: ClassVar[str]
    """Name in a config's ``cohort.name``."""

    synchronous: ClassVar[bool] = True
    """Whether the rows of a release are sampled together, so that each can know of the others."""

    population: int | None
    """Number of rows that may be sampled: declared, public."""

    def __post_init__(self) -> None:
        check_settings(self, "cohort.")
        check_population(self.population)

    @property
    def rate(self) -> float:
        """Mean probability that a row is sampled, in (0, 1]."""
        return self.law().rate

    @property
    def adjacency(self) -> Adjacency:
        """The adjacency that the law's cost refers to."""
        return self.law().adjacency

    @property
    def expected_size(self) -> float:
        """``rate * population``: the denominator of a private mean.

        Raises
        ------
        FedsimError
            If no population was declared: the number of reachable clients must not replace it.
        """
        return self.rate * declared_population(self)

    @property
    def horizon(self) -> int | None:
        """Number of rounds that it can draw for; None for any number.

        By default this is the setting ``rounds``, if the sampler has it: a config fills it in.
        """
        rounds: int | None = getattr(self, "rounds", None)
        return rounds

    @abstractmethod
    def draw(self, round: int, draws: Draws, step: int = 0) -> Ints:
        """Ids of the sampled rows, each at most once.

        Parameters
        ----------
        round : int
            Number of the round, which the sample may depend on (groups in turn, a minimum
            separation, a trace). Rounds are drawn in ascending order.
        draws : Draws
            Keyed generators, ``draws.generator(round, part)``; each address is used once.
        step : int
            Number of the sample within the round (a batch); a cohort is step 0.

        Raises
        ------
        FedsimError
            If no population was declared.
        """

    @abstractmethod
    def law(self) -> Law:
        """Law of one draw: its privacy cost."""

    def participation(self, rounds: int) -> Participation:
        """Rounds out of ``rounds`` in which one row can be sampled; by default any."""
        return Participation(rounds)

    def gaussians(self, count: int) -> int:
        """How often the law is charged for ``count`` sums, of steps 0 to ``count - 1``."""
        return count

    def state(self) -> SamplerState:
        """What later draws depend on, for a checkpoint; most samplers have no state."""
        return {}

    def restore(self, state: SamplerState) -> None:
        """Resume from a `state`, perhaps in another process."""
        if state:
            raise FedsimError(
                f"the state holds {', '.join(sorted(state))} of a sampler, but "
                f"{type(self).__name__} has no state; it must be of a run with this cohort."
            )


@dataclass(frozen=True)
class RememberingSampler(Sampler):
    """A sampler whose draws depend on earlier draws.

    Attributes
    ----------
    memory : dict of str to int64 arrays and int
        State of the draws: filled by the first one, changed by each, all of it in a checkpoint.
    """

    # Changed in place and excluded from comparison: the sampler stays a frozen value that equals
    # any other with the same settings, before and after draws.
    memory: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def state(self) -> SamplerState:
        """Copy of the memory; empty before the first draw."""
        return {name: np.copy(value) for name, value in self.memory.items()}

    def restore(self, state: SamplerState) -> None:
        """Resume from a `state`, perhaps in another process."""
        self.memory.clear()
        self.memory.update({n: np.array(value, dtype=np.int64) for n, value in state.items()})


@check_arguments
def check_population(population: int | None) -> None:
    """Refuse a population below 1."""
    if population is not None and population < 1:
        raise FedsimError(f"cohort.population is {population}; it must be 1 or more.")


def declared_population(sampler: Sampler) -> int:
    """The sampler's population.

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
