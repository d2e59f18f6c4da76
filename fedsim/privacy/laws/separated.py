"""Minimum separation: a client that was sampled cannot be sampled again for some rounds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np

from fedsim.array_types import Ints
from fedsim.privacy.laws.base import Law, Participation
from fedsim.privacy.laws.sampler import RememberingSampler, declared_population
from fedsim.randomness import Draws
from fedsim.registry import register
from fedsim.settings import Ge, Gt, Le


@dataclass(frozen=True, kw_only=True)
class SeparatedLaw(Law):
    """Law of a row in at most one of any ``separation`` consecutive rounds; no amplification."""

    name: ClassVar[str] = "separated"
    separation: Annotated[int, Ge(1)] = 1

    @property
    def rounds(self) -> int:
        """``separation``: one event covers so many consecutive rounds; a row is in one of them."""
        return self.separation

    @property
    def known_sample_law(self) -> Law:
        """The same law, which counts on no secret."""
        return replace(self, adjacency="zero-out")

    def inclusion(self, population: int) -> None:
        """None: a draw depends on earlier draws."""

    @property
    def label(self) -> str:
        """Short description, for tables."""
        return f"{self.separation} rounds apart, no amplification"

    def sentence(self, row: str) -> str:
        """How a ``row`` is sampled: a phrase of the privacy statement."""
        return (
            f"no {row} in two of any {self.separation} rounds in a row (no amplification by "
            "sampling)"
        )

    def round_sentence(self, population: int) -> str:
        """Which clients take part in a round: a sentence for reports."""
        return (
            f"A client that has taken part is not sampled in the next {self.separation - 1} rounds."
        )


@register("cohort", "separated")
@dataclass(frozen=True)
class Separated(RememberingSampler):
    """Clients that were in none of the last ``separation - 1`` rounds, each with probability rate.

    The separation bounds the sensitivity of noise that is correlated over rounds. The process
    starts in its stationary state, so that all rounds have the same expected size (until clients
    reach ``max_participations``).

    Guarantee: add-remove or zero-out, without amplification.

    Parameters
    ----------
    separation : int
        Least number of rounds from one participation of a client to its next.
    rate : float
        Sampling probability of a client that may be sampled, in (0, 1].
    population : int or None
        Number of clients: declared, public.
    max_participations : int
        Largest number of rounds of one client; 0 for no limit. A limit lowers the sensitivity of
        correlated noise; independent noise is charged as if there were none.
    """

    name: ClassVar[str] = "separated"
    separation: Annotated[int, Ge(1)] = 10
    """The least number of rounds between two participations of a client."""
    rate: Annotated[float, Gt(0), Le(1.0)] = 0.5
    """The sampling rate of the clients that may be sampled in a round."""
    population: int | None = None
    max_participations: Annotated[int, Ge(0)] = 0
    """The most rounds in which a client takes part; 0 for any number."""

    @property
    def expected_size(self) -> float:
        """``population / (separation - 1 + 1 / rate)``; in every round, if there is no limit."""
        return declared_population(self) / (self.separation - 1 + 1 / self.rate)

    def draw(self, round: int, draws: Draws, step: int = 0) -> Ints:
        """Sorted ids; rounds must be drawn in order."""
        if not self.memory:
            last = self._stationary(draws.generator(0, 0).random(declared_population(self)))
            self.memory.update(last=last, count=np.zeros_like(last))
        last, count = self.memory["last"], self.memory["count"]
        free = np.flatnonzero(round - last >= self.separation)
        ids: Ints = free[draws.generator(round, step).random(len(free)) < self.rate]
        if self.max_participations:
            ids = ids[count[ids] < self.max_participations]
        last[ids] = round
        count[ids] += 1
        return ids

    def _stationary(self, numbers: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Ints:
        """Each client's last round before round 1, drawn from the stationary distribution."""
        # A client is free, or waits for 1 to separation - 1 more rounds. In the stationary state
        # these probabilities are as 1 to rate: as many clients leave the free ones in a round as
        # come back. One uniform number, scaled to [0, waiting), gives the state by its interval.
        waiting = 1 + (self.separation - 1) * self.rate
        place = np.ceil((numbers * waiting - 1) / self.rate).clip(0, self.separation - 1)
        return np.where(place == 0, 1 - self.separation, 1 - place).astype(np.int64)

    def law(self) -> SeparatedLaw:
        """A plain Gaussian, without amplification."""
        return SeparatedLaw(separation=self.separation, population=self.population)

    def participation(self, rounds: int) -> Participation:
        """Rounds at least ``separation`` apart, at most ``max_participations`` of them."""
        return Participation(rounds, self.separation, self.max_participations or None)
