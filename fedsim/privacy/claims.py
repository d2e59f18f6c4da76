"""What may be claimed of a composition: of a run that releases ended, of clients, of a larger
cohort.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from fedsim.arguments import check_arguments
from fedsim.errors import FedsimError
from fedsim.privacy.accountant import Accountant, Cost, checked_event
from fedsim.privacy.entry import Entry, History
from fedsim.privacy.events import Event
from fedsim.privacy.laws.base import Law

Figures = Sequence[tuple[Accountant, float]]
"""Compositions, each at its own delta: the least epsilon of all of them may be claimed."""


def shared_cost(spent: Accountant, planned: Accountant, delta: float, times: int) -> Cost:
    """The cost of a composition that releases have chosen among ``times`` possible ones.

    The lesser of epsilon of ``spent`` at ``delta / (2 times)`` and of ``planned`` at ``delta / 2``.

    Guarantee: (epsilon, delta) for whichever outcome came about, over all of them together.
    Proof: let outcome s be claimed at E_s, and L_s be its loss. The whole delta is the sum over s
    of E[1{s} (1 - exp(E_s - L_s))+]. Outcomes claimed by their own figure add at most
    ``delta / (2 times)`` each, ``delta / 2`` together. The others are claimed at one epsilon, that
    of ``planned``, of which every outcome is a post-processing, and add at most ``delta / 2``
    together. (The lesser of two figures that each hold at ``delta`` may add up to twice that.)

    Parameters
    ----------
    spent : Accountant
        What was released.
    planned : Accountant
        The same, and all that would have been released in any outcome.
    delta : float
    times : int
        1 or more.
    """
    return _cost(_shared(spent, planned, delta, times), delta)


@dataclass(frozen=True)
class Stopping:
    """How far a run was to go, and whether what it released may end it before.

    Attributes
    ----------
    times : int
        After how many rounds that may be, as was declared before the first one: all of them with
        ``stop.metric`` or ``stop.callbacks``. 0: it was not declared.
    left : int
        Planned rounds that have not been made; 0 where the number made was fixed in advance.
    made : int
        Planned rounds that have been made.
    evaluation : Event or None
        What the metrics of clients cost that are released every ``evaluation_every`` rounds.
    evaluation_every : int
    max_epsilon : float or None
        The budget of a run all of whose rounds have one event.
    budget_delta : float
        Where that budget is held; at a smaller delta it says nothing.
    run : str or None
        Which run it is, in ledgers that several runs share.
    """

    times: int = 0
    left: int = 0
    made: int = 0
    evaluation: Event | None = None
    evaluation_every: int = 1
    max_epsilon: float | None = None
    budget_delta: float = math.inf
    run: str | None = None

    def planned_delta(self, delta: float) -> float:
        """Where all planned rounds are accounted for, and a budget or target is held.

        The other half of delta is for ending earlier, where that was declared.
        """
        return delta / 2 if self.times else delta

    def after(self, made: int) -> Stopping:
        """The same after so many of the planned rounds."""
        return replace(self, left=max(self.left - made, 0), made=self.made + made)

    def planned(self, history: History) -> Accountant:
        """The accountant of all planned rounds, of which a history has those that were made."""
        last = history.last(self.run)
        if last is not None and last.kind == "planned":
            return history.accountant  # releases have ended it, and the ledger charges the rest
        return self._with_further(history)

    def _with_further(self, history: History) -> Accountant:
        planned = history.accountant.copy()
        for event in self.further(history):
            planned.add(event)
        return planned

    def further(self, history: History) -> list[Event]:
        """What the planned rounds cost that have not been made, and their evaluations.

        Without what the history charges of them already.
        """
        last = history.last_round(self.run) if self.left else None
        if last is None:
            return []
        events = [last.event.further(self.left, self.made)]
        if self.evaluation is not None:
            every = self.evaluation_every
            if evaluations := (self.made + self.left) // every - self.made // every:
                events.append(self.evaluation.times(evaluations))
        left = [(event, event.count - history.ahead(event, self.run)) for event in events]
        return [event.once.times(count) for event, count in left if count > 0]

    def unmade(self, history: History) -> list[Entry]:
        """Lines that charge what was planned and is not made, once releases have ended the run.

        A budget would have ended it too: in which round, events alone decide.
        """
        last = history.last_round(self.run)
        if last is None or history.last(self.run) is None or not history.accountant.private:
            return []
        plan, at = self, self.planned_delta(self.budget_delta)
        if self.max_epsilon is not None and history.accountant.epsilon(at) <= self.max_epsilon:

            def epsilon(left: int) -> float:
                return replace(self, left=left)._with_further(history).epsilon(at)

            within = bisect(range(self.left + 1), self.max_epsilon, key=epsilon) - 1
            plan = replace(self, left=within)
        line = replace(
            last, kind="planned", attempt=0, settles=False, fragment="", fingerprint=None, sum=None
        )
        return [replace(line, event=event) for event in plan.further(history)]

    def epsilon(self, history: History, delta: float) -> float:
        """Epsilon that may be claimed of a history, after any round.

        Where it was declared that releases may end the run, that is `shared_cost`. Where they have
        ended it and it was not declared, all planned rounds count: what is released of them is a
        post-processing. A budget makes the plan shorter: its check looks at events alone, which
        are the same in every round and known before the first, so the round in which it ends a
        run is fixed in advance, and the rounds until then cost no more than the budget.
        """
        figures = self._figures(history, delta)
        return self._within_budget(history, delta, min(a.epsilon(at) for a, at in figures))

    def cost(self, history: History, delta: float) -> Cost:
        """The same, with how it was found."""
        cost = _cost(self._figures(history, delta), delta)
        epsilon = self._within_budget(history, delta, cost.epsilon)
        return replace(cost, epsilon=epsilon, releases=history.releases)

    def _figures(self, history: History, delta: float) -> Figures:
        planned = self.planned(history)
        if self.times and self.left:
            return _shared(history.spent, planned, delta, self.times)
        return [(planned, self.planned_delta(delta))]

    def _within_budget(self, history: History, delta: float, epsilon: float) -> float:
        if not self.left or self.max_epsilon is None or delta < self.budget_delta:
            return epsilon
        # A budget that is exceeded already did not hold for what has been released.
        holds = history.spent.epsilon(self.planned_delta(delta)) <= self.max_epsilon
        return min(epsilon, self.max_epsilon) if holds else epsilon


FIXED = Stopping()
"""The number of rounds was fixed in advance."""


def _shared(spent: Accountant, planned: Accountant, delta: float, times: int) -> Figures:
    return [(spent, delta / (2 * times)), (planned, delta / 2)]


def _cost(figures: Figures, delta: float) -> Cost:
    accountant, at = min(figures, key=lambda figure: figure[0].epsilon(figure[1]))
    return replace(accountant.cost(at), delta=delta)


@check_arguments
def worst_client(events: Iterable[Event], delta: float) -> Event:
    """The costliest of what clients that hold disjoint data release, at example level.

    Parameters
    ----------
    events : iterable of Event
        One a client: all its invocations at its own rate ``|B| / N_i``. Only those on the
        Pareto front of (noise, rate, count) are accounted for.
    delta : float

    Raises
    ------
    FedsimError
        If there is no client.
    """
    front = _pareto_front({checked_event(event) for event in events})
    if not front:
        raise FedsimError("there are no clients to account for.")
    return max(front, key=lambda event: Accountant([event]).epsilon(delta))


def costliest(histories: Sequence[History], delta: float, stopping: Stopping = FIXED) -> History:
    """The history with the largest epsilon that may be claimed.

    Only one of those that say the same is accounted for, and of those with one kind of event
    only the Pareto front.
    """
    if stopping.times and any(history.spent is not history.accountant for history in histories):
        return max(histories, key=lambda history: stopping.epsilon(history, delta))
    distinct = {frozenset(history.counts.items()): history for history in reversed(histories)}
    single = {
        next(event.times(count) for event, count in counts): counts
        for counts in distinct
        if len(counts) == 1
    }
    candidates = [distinct[single[event]] for event in _pareto_front(single)]
    candidates += [history for counts, history in distinct.items() if len(counts) != 1]
    return max(candidates, key=lambda history: stopping.epsilon(history, delta))


def _pareto_front(events: Iterable[Event]) -> list[Event]:
    """Events that no other of their kind is at least as costly as in every respect."""

    def key(event: Event) -> tuple[float, float, int]:
        return (-event.total_noise_multiplier, event.law.rate, event.count)

    front: list[Event] = []
    for event in sorted(events, key=key, reverse=True):
        beaten = any(
            costlier.law.comparable(event.law)
            and (event.private or not costlier.private)
            and all(a >= b for a, b in zip(key(costlier), key(event), strict=True))
            for costlier in front
        )
        if not beaten:
            front.append(event)
    return front


@dataclass(frozen=True)
class Extrapolation:
    """What a larger cohort would have cost; never shown without the run's own epsilon.

    With a cohort of expected size m, and noise of standard deviation ``z C m / M`` on its sum, the
    mean has the noise that it would have with a cohort of M and multiplier z.

    Attributes
    ----------
    epsilon, delta : float
        Of as many releases, with the larger cohort.
    size : float
        M, its expected size.
    population : int
        The clients that it would be sampled from.
    noise_multiplier : float
        z.
    """

    epsilon: float
    delta: float
    size: float
    population: int
    noise_multiplier: float

    @classmethod
    def of(
        cls, law: Law, population: int, noise_multiplier: float, releases: int, delta: float
    ) -> Self:
        """Of so many releases with cohorts of this law."""
        event = Event(noise_multiplier=noise_multiplier, law=law)
        cost = Accountant([event.times(releases)] if releases else []).cost(delta)
        return cls(cost.epsilon, delta, law.rate * population, population, noise_multiplier)

    def sentence(self) -> str:
        """In plain words."""
        return (
            f"Extrapolated epsilon: {self.epsilon:.4g} at delta = {self.delta:g}, if in each "
            f"release {self.size:g} clients out of {self.population:,} had taken part with a noise "
            f"multiplier of {self.noise_multiplier:g} (noise.cohort-size). This run has added that "
            "run's noise on the mean, which is less than its own cohort needs for it: the "
            "extrapolated figure is no guarantee of this run."
        )
