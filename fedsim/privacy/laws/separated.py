"""Minimum separation: a sampled client is not sampled in some rounds after, and then at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from fedsim.errors import FedsimError
from fedsim.privacy.laws.base import Law, Participation
from fedsim.privacy.laws.sampler import Ids, RememberingSampler, declared_population
from fedsim.randomness import Draws
from fedsim.registry import register
from fedsim.settings import Doc, Ge, Gt, Le


@dataclass(frozen=True, kw_only=True)
class SeparatedLaw(Law):
    """A row is in at most one of any ``separation`` rounds in a row; sampling amplifies nothing."""

    name: ClassVar[str] = "separated"
    separation: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.separation < 1:
            raise FedsimError(f"separation is {self.separation}; it must be 1 or more.")

    @property
    def rounds(self) -> int:
        """So many rounds in a row, of which a row is in at most one."""
        return self.separation

    def inclusion(self, population: int) -> None:
        """None: a draw depends on the draws before it."""

    @property
    def label(self) -> str:
        """A few words for a table."""
        return f"{self.separation} rounds apart, no amplification"

    def sentence(self, row: str) -> str:
        """How a ``row`` is drawn, for a statement."""
        return (
            f"no {row} in two of any {self.separation} rounds in a row (no amplification by "
            "sampling)"
        )

    def round_sentence(self, population: int) -> str:
        """Which clients take part in a round, for a report."""
        return (
            f"A client that has taken part is not sampled in the next {self.separation - 1} rounds."
        )


@register("cohort", "separated")
@dataclass(frozen=True)
class Separated(RememberingSampler):
    """Each client that was in none of the last ``separation - 1`` rounds, with probability rate.

    The separation bounds the sensitivity of noise that is correlated over rounds. The process
    starts in its stationary state, so that all rounds have the same expected size (until clients
    reach ``max_participations``).

    Guarantee: add-remove or zero-out, without amplification.

    Parameters
    ----------
    separation : int
    rate : float
        In (0, 1].
    population : int or None
        Declared public number.
    max_participations : int
        How often a client takes part at most; 0 for no limit. It lowers the sensitivity of
        correlated noise; independent noise is charged as if there were no limit.
    """

    name: ClassVar[str] = "separated"
    separation: Annotated[
        int, Ge(1), Doc("A client that was sampled is sampled again so many rounds later at least.")
    ] = 10
    rate: Annotated[float, Gt(0), Le(1.0), Doc("The probability of those who may be sampled.")] = (
        0.5
    )
    population: int | None = None
    max_participations: Annotated[
        int, Ge(0), Doc("In how many rounds a client takes part at most; 0 for any number.")
    ] = 0

    @property
    def expected_size(self) -> float:
        """``population / (separation - 1 + 1 / rate)``, in every round without a limit."""
        return declared_population(self) / (self.separation - 1 + 1 / self.rate)

    def draw(self, round: int, draws: Draws, step: int = 0) -> Ids:
        """Sorted ids; rounds are drawn in turn."""
        if not self.memory:
            last = self._stationary(draws.generator(0, 0).random(declared_population(self)))
            self.memory.update(last=last, count=np.zeros_like(last))
        last, count = self.memory["last"], self.memory["count"]
        free = np.flatnonzero(round - last >= self.separation)
        ids: Ids = free[draws.generator(round, step).random(len(free)) < self.rate]
        if self.max_participations:
            ids = ids[count[ids] < self.max_participations]
        last[ids] = round
        count[ids] += 1
        return ids

    def _stationary(self, numbers: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Ids:
        """The last round of each before round 1, from the stationary distribution."""
        waiting = 1 + (self.separation - 1) * self.rate
        # 0 to 1: free; then one state for each round that is still to be waited for.
        place = np.ceil((numbers * waiting - 1) / self.rate).clip(0, self.separation - 1)
        return np.where(place == 0, 1 - self.separation, 1 - place).astype(np.int64)

    def law(self) -> SeparatedLaw:
        """No amplification."""
        return SeparatedLaw(separation=self.separation, population=self.population)

    def participation(self, rounds: int) -> Participation:
        """At least so many rounds apart, and at most so many rounds."""
        return Participation(rounds, self.separation, self.max_participations or None)
