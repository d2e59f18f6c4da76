"""Valid claims for runs that releases may end early, for many clients, and for a larger cohort."""

from __future__ import annotations

import math
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from fedsim.arguments import check_arguments
from fedsim.errors import FedsimError
from fedsim.privacy.accountant import Accountant, Cost, check_delta, checked_event
from fedsim.privacy.entry import Entry, History
from fedsim.privacy.events import Event
from fedsim.privacy.laws.base import Law
from fedsim.settings import check_settings


@dataclass(frozen=True)
class Budget:
    """The most that a ledger may spend.

    Attributes
    ----------
    epsilon, delta : float
    key : str
        Name of the setting that gives epsilon, for messages.
    """

    epsilon: float
    delta: float
    key: str = "max-epsilon"

    def __post_init__(self) -> None:
        check_settings(self)
        if not self.epsilon > 0:  # no cost would exceed NaN
            raise FedsimError(f"{self.key} is {self.epsilon}; it must be above 0.")
        check_delta(self.delta)

    def message(self, entry: Entry, ledger: Path | None = None) -> str:
        """Why the release of an entry may not be made: a sentence without its full stop.

        It names the path of ``ledger``, except for a client's entry: that sentence is sent to the
        server, which must not see a node's paths.
        """
        subject = "a release" if entry.round is None else f"round {entry.round}"
        evaluation = "the evaluation of " if entry.kind == "evaluation" else ""
        of_client = "" if entry.client is None else f" of client {entry.client}"
        place = "" if ledger is None or entry.client is not None else f" in ledger {ledger}"
        return (
            f"{evaluation}{subject} would exceed {self.key} = {self.epsilon}{of_client} at delta = "
            f"{self.delta}{place}"
        )


Figures = Sequence[tuple[Accountant, float]]
"""Compositions, each with its own delta: the least epsilon of all of them may be claimed."""


def shared_cost(spent: Accountant, planned: Accountant, delta: float, times: int) -> Cost:
    """Cost of a run that may end after any of ``times`` rounds, as its releases decide.

    It is the lesser of epsilon of ``spent`` at ``delta / (2 times)`` and of ``planned`` at
    ``delta / 2``.

    Guarantee: (epsilon, delta) for the outcome that occurred, valid over all outcomes together.
    Proof: let outcome s be claimed at E_s, and L_s be its loss. The total delta is the sum over s
    of E[1{s} (1 - exp(E_s - L_s))+]. Outcomes claimed by their own figure add at most
    ``delta / (2 times)`` each, ``delta / 2`` together. The others are claimed at one epsilon, that
    of ``planned``, of which every outcome is a post-processing, and add at most ``delta / 2``
    together. (The lesser of two figures that each hold at ``delta`` may add up to twice that.)

    Parameters
    ----------
    spent : Accountant
        What has been released.
    planned : Accountant
        What has been released, and all that would have been in any outcome.
    delta : float
    times : int
        Number of possible outcomes, 1 or more.
    """
    return _cost(_shared(spent, planned, delta, times), delta)


@dataclass(frozen=True)
class Stopping:
    """How many rounds a run was planned with, and whether its releases may end it early.

    Attributes
    ----------
    possible_ends : int
        Number of rounds after which the run may end early, declared before the first one: all of
        them with ``stop.metric`` or ``stop.callbacks``. 0 if early stopping was not declared.
    rounds_left : int
        Planned rounds that have not been made; 0 if the number made was fixed in advance.
    rounds_made : int
        Planned rounds that have been made.
    evaluation : Event or None
        Cost of the clients' metrics, which are released every ``evaluation_every`` rounds.
    evaluation_every : int
    max_epsilon : float or None
        Budget of the run, if all rounds have the same event.
    budget_delta : float
        Delta at which the budget holds; it implies nothing at a smaller one.
    run : str or None
        The run's id, in ledgers that several runs share.
    """

    possible_ends: int = 0
    rounds_left: int = 0
    rounds_made: int = 0
    evaluation: Event | None = None
    evaluation_every: int = 1
    max_epsilon: float | None = None
    budget_delta: float = math.inf
    run: str | None = None

    def planned_delta(self, delta: float) -> float:
        """Delta at which all planned rounds are accounted for, and a budget or target holds.

        If early stopping was declared this is one half of delta, and the other half pays for it.
        """
        return delta / 2 if self.possible_ends else delta

    def after(self, made: int) -> Stopping:
        """The same plan after ``made`` more of its rounds."""
        return replace(
            self, rounds_left=max(self.rounds_left - made, 0), rounds_made=self.rounds_made + made
        )

    def planned(self, history: History) -> Accountant:
        """Accountant of all planned rounds: those in the history, and those not made."""
        last = history.last(self.run)
        if last is not None and last.kind == "planned":
            return history.accountant  # the run was ended early, and the ledger charges the rest
        return self._with_further(history)

    def _with_further(self, history: History) -> Accountant:
        planned = history.accountant.copy()
        for event in self.further(history):
            planned.add(event)
        return planned

    def further(self, history: History) -> list[Event]:
        """Events of the planned rounds that have not been made, and of their evaluations.

        What the history has charged ahead for them is left out.
        """
        last = history.last_round(self.run) if self.rounds_left else None
        if last is None:
            return []
        planned = [last.event.further(self.rounds_left, self.rounds_made)]
        if self.evaluation is not None:
            interval, end = self.evaluation_every, self.rounds_made + self.rounds_left
            if evaluations := end // interval - self.rounds_made // interval:
                planned.append(self.evaluation.times(evaluations))
        # An evaluation may have the event of a round: both are then charged ahead as one.
        counts = Counter[Event]()
        for event in planned:
            counts[event.once] += event.count
        # An earlier end of this run, before it was resumed, may have charged some of them.
        left = [
            (event, count - history.charged_ahead(event, self.run))
            for event, count in counts.items()
        ]
        return [event.times(count) for event, count in left if count > 0]

    def lines_of_unmade_rounds(self, history: History) -> list[Entry]:
        """Ledger lines that charge planned rounds that are not made, when releases end the run.

        Only rounds within the budget are charged: it would have ended the run in a round that
        depends on events alone.
        """
        last = history.last_round(self.run)
        if last is None or history.last(self.run) is None or not history.accountant.private:
            return []
        plan, delta = self, self.planned_delta(self.budget_delta)
        if self.max_epsilon is not None and history.accountant.epsilon(delta) <= self.max_epsilon:

            def epsilon(left: int) -> float:
                return replace(self, rounds_left=left)._with_further(history).epsilon(delta)

            affordable = bisect(range(self.rounds_left + 1), self.max_epsilon, key=epsilon) - 1
            plan = replace(self, rounds_left=affordable)
        line = replace(
            last, kind="planned", attempt=0, settles=False, fragment="", fingerprint=None, sum=None
        )
        return [replace(line, event=event) for event in plan.further(history)]

    def epsilon(self, history: History, delta: float) -> float:
        """Epsilon that may be claimed of a history, after any round.

        If early stopping was declared, this is `shared_cost`. If releases have ended the run and
        it was not declared, all planned rounds count: the rounds made are a post-processing of
        them. A budget makes the plan shorter: its check depends on events alone, which are the
        same in every round and known before the first. The round in which it ends a run is
        therefore fixed in advance, and the rounds until then cost no more than the budget.
        """
        figures = self._figures(history, delta)
        return self._within_budget(history, delta, min(a.epsilon(at) for a, at in figures))

    def cost(self, history: History, delta: float) -> Cost:
        """The cost that may be claimed: `epsilon`, with its accounting method."""
        cost = _cost(self._figures(history, delta), delta)
        epsilon = self._within_budget(history, delta, cost.epsilon)
        return replace(cost, epsilon=epsilon, releases=history.releases)

    def _figures(self, history: History, delta: float) -> Figures:
        planned = self.planned(history)
        if self.possible_ends and self.rounds_left:
            return _shared(history.spent(self.run), planned, delta, self.possible_ends)
        return [(planned, self.planned_delta(delta))]

    def _within_budget(self, history: History, delta: float, epsilon: float) -> float:
        if not self.rounds_left or self.max_epsilon is None or delta < self.budget_delta:
            return epsilon
        # If the releases already exceed the budget, it was not enforced.
        holds = history.spent(self.run).epsilon(self.planned_delta(delta)) <= self.max_epsilon
        return min(epsilon, self.max_epsilon) if holds else epsilon


FIXED = Stopping()
"""A run whose number of rounds was fixed in advance."""


def _shared(spent: Accountant, planned: Accountant, delta: float, times: int) -> Figures:
    return [(spent, delta / (2 * times)), (planned, delta / 2)]


def _cost(figures: Figures, delta: float) -> Cost:
    accountant, at = min(figures, key=lambda figure: figure[0].epsilon(figure[1]))
    return replace(accountant.cost(at), delta=delta)


@check_arguments
def worst_client(events: Iterable[Event], delta: float) -> Event:
    """The costliest event of clients with disjoint data, at example level.

    Parameters
    ----------
    events : iterable of Event
        One event for each client: all its invocations, at its own rate ``|B| / N_i``. Only those
        on the Pareto front of (noise, rate, count) are accounted for.
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
    """The history with the largest epsilon, as `Stopping.epsilon` claims it.

    Of equal histories only one is accounted for, and of those with a single kind of event only the
    Pareto front: there may be one for each of thousands of clients.
    """
    # With early stopping the claim depends on more than the counts of events, if some are charged
    # ahead: no history may then be left out.
    run = stopping.run
    if stopping.possible_ends and any(h.spent(run) is not h.accountant for h in histories):
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
    """Events that no comparable event dominates, being at least as costly in every respect."""

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
    """Epsilon of a hypothetical larger cohort; never shown without the run's own epsilon.

    A cohort of expected size m, with noise of standard deviation ``z C m / M`` on its sum, has the
    same noise on its mean as a cohort of expected size M with noise multiplier z.

    Attributes
    ----------
    epsilon, delta : float
        Cost of as many releases with the larger cohort.
    size : float
        M, the expected size of the larger cohort.
    population : int
        Number of clients that it would be sampled from.
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
        """Extrapolate to ``releases`` releases with cohorts of this law."""
        event = Event(noise_multiplier=noise_multiplier, law=law)
        cost = Accountant([event.times(releases)] if releases else []).cost(delta)
        return cls(cost.epsilon, delta, law.rate * population, population, noise_multiplier)

    def sentence(self) -> str:
        """The extrapolation as a sentence of a statement."""
        return (
            f"Extrapolated epsilon: {self.epsilon:.4g} at delta = {self.delta:g}, if in each "
            f"release {self.size:g} clients out of {self.population:,} had taken part with a noise "
            f"multiplier of {self.noise_multiplier:g} (noise.cohort-size). This run has added that "
            "run's noise on the mean, which is less than its own cohort needs for it: the "
            "extrapolated figure is no guarantee of this run."
        )
