"""Buffered asynchronous rounds: who takes part follows from a public schedule, and nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedsim.array_types import Ints
from fedsim.errors import FedsimError
from fedsim.privacy.laws.base import Adjacency, Law, Participation
from fedsim.privacy.laws.sampler import Sampler
from fedsim.randomness import Draws
from fedsim.registry import register
from fedsim.settings import Ge


@dataclass(frozen=True, kw_only=True)
class BufferedLaw(Law):
    """Law of a plan whose public schedule has each row in at most ``participations`` releases.

    The schedule is no secret, so that nothing is amplified: the releases that a row is in are as
    many Gaussians, chosen adaptively, and together one of multiplier ``z / sqrt(participations)``.
    One event covers all ``rounds`` releases.
    """

    name: ClassVar[str] = "buffered"
    neighbours: ClassVar[tuple[Adjacency, ...]] = ("zero-out",)
    adjacency: Adjacency = "zero-out"
    participations: Annotated[int, Ge(1)] = 1
    rounds: Annotated[int, Ge(1)] = 1

    @property
    def sensitivity(self) -> float:
        """``sqrt(participations)``: of all releases together, in units of C."""
        return math.sqrt(self.participations)

    @property
    def known_sample_law(self) -> Law:
        """The same law, which counts on no secret."""
        return self

    def gaussian(self, noise_multiplier: float) -> float:
        """``sqrt(participations) / z``."""
        return self.sensitivity / noise_multiplier

    def inclusion(self, population: int) -> None:
        """None: who takes part depends on the devices' speed."""

    @property
    def label(self) -> str:
        """Short description, for tables."""
        times = "once" if self.participations == 1 else f"{self.participations:,} times"
        return f"buffered, at most {times} in {self.rounds:,}, no amplification"

    def sentence(self, row: str) -> str:
        """How a ``row`` is sampled: a phrase of the privacy statement."""
        return (
            f"each {row} in at most {self.participations:,} of {self.rounds:,} releases of a "
            "buffer, by a public schedule that no data enter (no amplification by sampling; a "
            f"{row} that fails keeps its place, with a zero)"
        )

    def round_sentence(self, population: int) -> str:
        """Which clients take part in a round: a sentence for reports."""
        return (
            "A release adds the updates that fill a buffer, in the order in which devices finish; "
            f"each client is in at most {self.participations:,} of {self.rounds:,} releases."
        )


@register("cohort", "buffered")
@dataclass(frozen=True)
class Buffered(Sampler):
    """Buffered asynchronous rounds (FedBuff, Nguyen et al. 2022) on a virtual clock.

    ``concurrency`` clients train at a time, each from the newest model when it starts. When
    ``buffer`` updates are in, they are released, and the model has a new version. An update that
    is ``t`` versions late counts ``(1 + t)^-staleness``. A round is a release.

    Guarantee: zero-out, for the plan as a whole, which is charged before its first round. Who is in
    which release follows from the seed, the devices and public numbers; a client is at most once in
    a release, and in at most ``participations`` of them.

    Parameters
    ----------
    concurrency : int
        Number of clients that train at a time, at most the population.
    buffer : int
        Number of updates in a release, at most ``concurrency``: the denominator.
    staleness : float
        Exponent of the weight of a late update; 0 for equal weights.
    participations : int
        Largest number of releases of one client; it then takes part no more.
    separation : int
        Least number of releases from one with a client's update to the next.
    rounds : int
        Number of releases of the plan; it cannot be changed later.
    population : int or None
        Number of clients: declared, public.

    Raises
    ------
    FedsimError
        If the buffer is larger than the concurrency, or this than the population.
    """

    name: ClassVar[str] = "buffered"
    synchronous: ClassVar[bool] = False
    concurrency: Annotated[int, Ge(1)] = 20
    """How many clients train at a time."""
    buffer: Annotated[int, Ge(1)] = 10
    """How many updates a release adds: the model changes when so many have come in."""
    staleness: Annotated[float, Ge(0)] = 0.5
    """Exponent a of the weight (1 + t)^-a of an update that is t releases late."""
    participations: Annotated[int, Ge(1)] = 1
    """The most releases that a client is in: what a client's privacy costs grows with its root."""
    separation: Annotated[int, Ge(1)] = 1
    """The least number of releases from one that a client is in to its next."""
    rounds: Annotated[int, Ge(1)] = 1
    population: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.buffer > self.concurrency:
            raise FedsimError(
                f"cohort.buffer is {self.buffer}; it must be at most cohort.concurrency = "
                f"{self.concurrency}: a client waits for the release that has its update, so that "
                "a larger buffer would never be full."
            )
        if self.population is not None and self.concurrency > self.population:
            raise FedsimError(
                f"cohort.concurrency is {self.concurrency}; it must be at most the population, "
                f"{self.population} (partition.clients)."
            )

    @property
    def expected_size(self) -> float:
        """``buffer``: the number of updates in each release, of failed clients too."""
        return float(self.buffer)

    def weight(self, staleness: float) -> float:
        """Weight of an update that is so many versions late, in (0, 1]."""
        return float((1 + staleness) ** -self.staleness)

    def draw(self, round: int, draws: Draws, step: int = 0) -> Ints:
        """Refused: who takes part depends on the devices too (`fedsim.federation.buffered`).

        Raises
        ------
        FedsimError
        """
        raise FedsimError(
            "a buffered cohort is not drawn round by round; DPFedAvg takes its schedule, as "
            "Availability(schedule=ReleaseSchedule.of(cohort, seconds, seed))."
        )

    def law(self) -> BufferedLaw:
        """One Gaussian for each release that a client can be in."""
        return BufferedLaw(
            participations=self.participation(self.rounds).participations,
            rounds=self.rounds,
            population=self.population,
        )

    def participation(self, rounds: int) -> Participation:
        """Releases at least ``separation`` apart, at most ``participations`` of them."""
        return Participation(rounds, self.separation, self.participations)
