"""Questions: of noise, rounds and epsilon, two are given and the third is the answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from fedsim.errors import FedsimError
from fedsim.privacy.accountant import Accountant, Cost
from fedsim.privacy.calibration import calibrate_events, rounds_within_events
from fedsim.privacy.events import Adjacency, Event, Level, Sampling
from fedsim.privacy.stopping import FIXED, Stopping

__all__ = ["Answer", "Question"]

Given = TypeVar("Given")


@dataclass(frozen=True, kw_only=True)
class Question:
    """A run as the accountant sees it, with one thing left open.

    ``target_epsilon`` asks for the noise multiplier, ``max_epsilon`` for the rounds that it
    buys, neither for epsilon.

    Attributes
    ----------
    noise_multiplier, target_epsilon, max_epsilon : float or None
    rounds : int or None
        Rounds still to be run. At example level, a client's iterations or passes.
    delta : float
    sampler, rate, size, population, adjacency
        As in `Event`.
    invocations : int
        Noisy sums a round, each on a sample of its own: 2 for ADADP.
    level : "client" or "example"
    past : tuple of Event
        What has been released already.
    simulated : bool
        Whether noise follows from a config's seed, which is no secret.
    stopping : Stopping
        Whether what is released may end the run: of all rounds, epsilon is then that at half of
        delta.
    """

    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    max_epsilon: float | None = None
    rounds: int | None = None
    delta: float = 1e-5
    sampler: Sampling = "full"
    rate: float = 1.0
    size: int | None = None
    population: int | None = None
    adjacency: Adjacency | None = None
    invocations: int = 1
    level: Level = "client"
    past: tuple[Event, ...] = ()
    simulated: bool = False
    stopping: Stopping = FIXED

    @property
    def asks(self) -> Literal["epsilon", "noise multiplier", "rounds"]:
        """What is left open."""
        if self.target_epsilon is not None:
            return "noise multiplier"
        return "rounds" if self.max_epsilon is not None else "epsilon"

    def about(self, event: Event) -> Question:
        """The same question of rounds that cost what this one did, but for the noise."""
        return replace(
            self,
            sampler=event.sampler,
            rate=event.rate,
            size=event.size,
            population=event.population,
            adjacency=event.adjacency,
            invocations=event.count,
        )

    def event(self, noise_multiplier: float) -> Event:
        """What one round costs at this noise."""
        adjacency = self.adjacency
        if self.level == "example":
            if adjacency == "add-remove":
                raise FedsimError(
                    "adjacency is 'add-remove'; at example level it must be zero-out, since how "
                    "many examples a client has is public."
                )
            adjacency = adjacency or ("zero-out" if self.sampler != "fixed" else None)
        return Event(
            noise_multiplier=noise_multiplier,
            sampler=self.sampler,
            rate=self.rate,
            size=self.size,
            population=self.population,
            adjacency=adjacency,
            count=self.invocations,
        )

    def answer(self) -> Answer:
        """Fill in what is open.

        Raises
        ------
        FedsimError
            If something else is missing too, or given twice, or nothing meets the target.
        """
        if self.target_epsilon is not None and self.max_epsilon is not None:
            raise FedsimError(
                f"target epsilon is {self.target_epsilon} and max epsilon {self.max_epsilon}; "
                "give the first to get a noise multiplier, or the second to get rounds."
            )
        if self.asks == "noise multiplier":
            return self._noise(self._given("rounds", self.rounds))
        noise = self._given("noise multiplier", self.noise_multiplier)
        if self.max_epsilon is not None:
            rounds = rounds_within_events(
                self.past, self.event(noise), max_epsilon=self.max_epsilon, delta=self._at
            )
            return self._answered(noise, rounds)
        return self._answered(noise, self._given("rounds", self.rounds))

    def _noise(self, rounds: int) -> Answer:
        if self.noise_multiplier is not None:
            raise FedsimError(
                f"noise multiplier is {self.noise_multiplier}; it must be unset when target "
                f"epsilon = {self.target_epsilon} asks for it."
            )
        noise = calibrate_events(
            lambda z: [*self.past, self.event(z).times(self._positive(rounds))],
            target_epsilon=self._given("target epsilon", self.target_epsilon),
            delta=self._at,
            adaptive=bool(self.past),
        )
        answer = self._answered(noise, rounds)
        if not self.past:
            return answer
        # The noise was chosen after looking at releases: only Rényi accounting covers that.
        cost = replace(answer.cost, epsilon=answer.cost.rdp_epsilon, method="rdp")
        return replace(answer, cost=cost)

    def _answered(self, noise: float, rounds: int) -> Answer:
        accountant = Accountant(self.past)
        if rounds or self.asks == "epsilon":
            accountant.add(self.event(noise), self._positive(rounds))
        cost = replace(accountant.cost(self._at), delta=self.delta)
        return Answer(self, noise, rounds, cost)

    @property
    def _at(self) -> float:
        return self.stopping.planned_delta(self.delta)

    @staticmethod
    def _positive(rounds: int) -> int:
        if rounds < 1:
            raise FedsimError(f"rounds is {rounds}; it must be a whole number, 1 or more.")
        return rounds

    def _given(self, name: str, value: Given | None) -> Given:
        if value is None:
            raise FedsimError(
                f"{name} is not set; it must be, to find the {self.asks}: of noise multiplier, "
                "rounds and an epsilon, two determine the third."
            )
        return value


@dataclass(frozen=True)
class Answer:
    """A question with nothing left open, and what it costs."""

    question: Question
    noise_multiplier: float
    rounds: int
    cost: Cost

    @property
    def events(self) -> tuple[Event, ...]:
        """All that is released."""
        if not self.rounds:
            return self.question.past
        return (*self.question.past, self.question.event(self.noise_multiplier).times(self.rounds))
