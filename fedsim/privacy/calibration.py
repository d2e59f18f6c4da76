"""Calibration: of noise multiplier, rounds and epsilon, two determine the third."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeVar

from fedsim.arguments import as_text, check_arguments
from fedsim.errors import FedsimError
from fedsim.privacy.accountant import Accountant, Cost, check_delta
from fedsim.privacy.events import Event
from fedsim.privacy.laws import FullLaw, Law, Level, Sampler
from fedsim.privacy.laws.base import check_level
from fedsim.privacy.losses import gaussian_mu

Value = TypeVar("Value")

# Range of calibrated noise multipliers; outside of it the target or the plan is a mistake.
MIN_MULTIPLIER, MAX_MULTIPLIER = 1e-2, 1e7
MAX_ROUNDS = 10**8


@check_arguments
def epsilon(*, noise_multiplier: float, cohort: Sampler, rounds: int, delta: float) -> float:
    """Epsilon at ``delta`` of ``rounds`` releases, each over a new cohort.

    Parameters
    ----------
    noise_multiplier : float
        Standard deviation of the noise on the sum divided by the clip norm.
    cohort : PoissonCohort, FixedCohort or FullCohort
        The sampler, which determines the adjacency too.
    rounds : int
        Releases; at example level, mechanism invocations (two for each ADADP iteration).
    delta : float

    Examples
    --------
    >>> from fedsim.cohorts import PoissonCohort
    >>> round(epsilon(noise_multiplier=1.1, cohort=PoissonCohort(0.01), rounds=1000, delta=1e-5), 3)
    1.515
    """
    return _plan(noise_multiplier, cohort, rounds).epsilon(delta)


@check_arguments
def cost(*, noise_multiplier: float, cohort: Sampler, rounds: int, delta: float) -> Cost:
    """`epsilon`, with its accounting method and the figures to compare it with."""
    return _plan(noise_multiplier, cohort, rounds).cost(delta)


def _plan(noise_multiplier: float, cohort: Sampler, rounds: int) -> Accountant:
    _check_rounds(rounds)
    return Accountant([Event.of(cohort, noise_multiplier).over_rounds(rounds)])


@check_arguments
def calibrate(*, target_epsilon: float, cohort: Sampler, rounds: int, delta: float) -> float:
    """Smallest noise multiplier whose epsilon does not exceed the target, to 1e-5 relative.

    Parameters
    ----------
    target_epsilon : float
    cohort : PoissonCohort, FixedCohort or FullCohort
    rounds : int
        Releases; at example level, mechanism invocations.
    delta : float

    Examples
    --------
    >>> from fedsim.cohorts import FullCohort
    >>> round(calibrate(target_epsilon=5.0, cohort=FullCohort(), rounds=500, delta=1e-6), 2)
    21.91
    """
    _check_rounds(rounds)
    return calibrate_events(
        lambda z: [Event.of(cohort, z).over_rounds(rounds)],
        target_epsilon=target_epsilon,
        delta=delta,
    )


@check_arguments
def calibrate_events(
    events: Callable[[float], Iterable[Event]],
    *,
    target_epsilon: float,
    delta: float,
    adaptive: bool = False,
) -> float:
    """Smallest ``z`` whose ``events(z)`` together stay within the target, to 1e-5 relative.

    Parameters
    ----------
    events : callable from z to events
        All events of the plan, for plans that are more than one equal event a round: noise that
        changes over rounds, or further releases. A larger ``z`` must mean more noise.
    target_epsilon, delta : float
    adaptive : bool
        Whether some events are in the past, so that the noise is chosen after looking at
        releases. Composition of loss distributions assumes noise fixed in advance, so that Rényi
        accounting is used instead.

    Raises
    ------
    FedsimError
        If no multiplier in [0.01, 1e7] meets the target.
    """
    check_delta(delta)
    if not 0 < target_epsilon < math.inf:
        raise FedsimError(f"target epsilon is {target_epsilon}; it must be positive and finite.")

    def excess(log_z: float) -> float:
        accountant = Accountant(events(math.exp(log_z)))
        epsilon = accountant.cost(delta).rdp_epsilon if adaptive else accountant.epsilon(delta)
        return math.log(max(epsilon, 1e-9) / target_epsilon)

    # First guess: all releases as one Gaussian whose sensitivity is scaled by the sampling rate,
    # which is roughly the effect of amplification. It is mostly within a factor of 2, so that the
    # root is found in about six evaluations, each of which composes the whole run.
    rates = [(event.law.rate, event.count) for event in events(1.0)]
    mu = math.sqrt(sum(count * rate**2 for rate, count in rates))
    guess = math.log(max(mu / gaussian_mu(target_epsilon, delta), 0.3))
    log_z = _decreasing_root(excess, guess, math.log(MIN_MULTIPLIER), math.log(MAX_MULTIPLIER))
    if log_z is None:
        raise FedsimError(
            f"target epsilon is {target_epsilon} at delta {delta}; no noise multiplier between "
            f"{MIN_MULTIPLIER} and {MAX_MULTIPLIER:g} meets it exactly: give the multiplier itself."
        )
    return math.exp(log_z)


@check_arguments
def rounds_within(
    *, max_epsilon: float, noise_multiplier: float, cohort: Sampler, delta: float
) -> int:
    """Largest number of rounds within the budget ``max_epsilon``; 0 if one exceeds it."""
    event = Event.of(cohort, noise_multiplier)
    return rounds_within_events([], event, max_epsilon=max_epsilon, delta=delta)


@check_arguments
def rounds_within_events(
    past: Iterable[Event],
    event: Event,
    *,
    max_epsilon: float,
    delta: float,
    others: Callable[[int], Iterable[Event]] = lambda rounds: (),
) -> int:
    """Largest number of rounds of ``event`` that fit into a budget after ``past``; 0 if none does.

    Parameters
    ----------
    past : iterable of Event
        Earlier releases.
    event : Event
        One round.
    max_epsilon, delta : float
        The budget.
    others : callable from a number of rounds to events
        Further releases in that many rounds, such as evaluations.

    Raises
    ------
    FedsimError
        If more than 10^8 rounds fit.
    """
    check_delta(delta)
    if not 0 < max_epsilon < math.inf:
        raise FedsimError(f"max epsilon is {max_epsilon}; it must be positive and finite.")
    before = Accountant(past)

    def fits(rounds: int) -> bool:
        total = before.copy()
        for further in others(rounds):
            total.add(further)
        return not total.would_exceed(event.over_rounds(rounds), max_epsilon, delta)

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
        if high > MAX_ROUNDS:
            raise FedsimError(
                f"max epsilon is {max_epsilon}; it buys more than {MAX_ROUNDS:,} rounds at a "
                f"noise multiplier of {event.noise_multiplier}, and needs no planning."
            )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@dataclass(frozen=True, kw_only=True)
class Question:
    """A run as the accountant sees it, with one quantity to be found.

    With ``target_epsilon`` this is the noise multiplier, with ``max_epsilon`` the number of rounds,
    with neither epsilon.

    Attributes
    ----------
    noise_multiplier, target_epsilon, max_epsilon : float or None
    rounds : int or None
        Rounds still to be run. At example level, a client's iterations or passes.
    delta : float
    law : Law
        Law of the sampling, as in `Event`.
    invocations : int
        Noisy sums in a round, each over a separate sample: 2 for ADADP.
    level : "client" or "example"
    past : tuple of Event
        Releases already made.
    further_events : callable of the question and a number of rounds
        Further releases in that many rounds.
    simulated : float
        1 if the noise follows from a config's seed, which is no secret, or the size of the larger
        cohort that is simulated in addition, as in `fedsim.privacy.statement.epsilon_marks`.
    may_stop : bool
        Whether releases may end the run early: all its rounds are charged before the first.
    """

    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    max_epsilon: float | None = None
    rounds: int | None = None
    delta: float = 1e-5
    law: Law = field(default_factory=FullLaw)
    invocations: int = 1
    level: Level = "client"
    past: tuple[Event, ...] = ()
    further_events: Callable[[Question, int], Sequence[Event]] = field(
        default=lambda question, rounds: (), compare=False, repr=False
    )
    simulated: float = False
    may_stop: bool = False

    @property
    def unknown(self) -> Literal["epsilon", "noise multiplier", "rounds"]:
        """The quantity to be found."""
        if self.target_epsilon is not None:
            return "noise multiplier"
        return "rounds" if self.max_epsilon is not None else "epsilon"

    def event(self, noise_multiplier: float) -> Event:
        """Event of one round at this noise."""
        check_level(self.level, self.law.adjacency)
        return Event(noise_multiplier=noise_multiplier, law=self.law, count=self.invocations)

    def events(self, noise_multiplier: float, rounds: int) -> tuple[Event, ...]:
        """All events, past ones included, of a run with ``rounds`` rounds at this noise."""
        further = (self.event(noise_multiplier).over_rounds(rounds),) if rounds else ()
        return (*self.past, *self.further_events(self, rounds), *further)

    def answer(self) -> Answer:
        """Find the missing quantity.

        Raises
        ------
        FedsimError
            If another quantity is missing, too many are given, or nothing meets the target.
        """
        if self.target_epsilon is not None and self.max_epsilon is not None:
            raise FedsimError(
                f"target epsilon is {self.target_epsilon} and max epsilon {self.max_epsilon}; "
                "give the first to get a noise multiplier, or the second to get rounds."
            )
        if self.unknown == "noise multiplier":
            return self._calibrated_answer(self._required("rounds", self.rounds))
        noise = self._required("noise multiplier", self.noise_multiplier)
        if self.max_epsilon is not None:
            rounds = rounds_within_events(
                self.past,
                self.event(noise),
                max_epsilon=self.max_epsilon,
                delta=self.delta,
                others=partial(self.further_events, self),
            )
            return self._answer_for(noise, rounds)
        return self._answer_for(noise, self._required("rounds", self.rounds))

    def _calibrated_answer(self, rounds: int) -> Answer:
        """Answer with the least noise multiplier that meets the target epsilon."""
        if self.noise_multiplier is not None:
            raise FedsimError(
                f"noise multiplier is {self.noise_multiplier}; it must be unset when target "
                f"epsilon = {self.target_epsilon} asks for it."
            )
        _check_rounds(rounds)
        noise = calibrate_events(
            lambda z: self.events(z, rounds),
            target_epsilon=self._required("target epsilon", self.target_epsilon),
            delta=self.delta,
            adaptive=bool(self.past),
        )
        answer = self._answer_for(noise, rounds)
        if not self.past:
            return answer
        # The noise was chosen after looking at releases: only Rényi accounting covers that.
        cost = replace(answer.cost, epsilon=answer.cost.rdp_epsilon, method="rdp")
        return replace(answer, cost=cost)

    def _answer_for(self, noise: float, rounds: int) -> Answer:
        if rounds or self.unknown == "epsilon":
            _check_rounds(rounds)
        accountant = Accountant(self.events(noise, rounds))
        cost = accountant.cost(self.delta)
        return Answer(self, noise, rounds, cost)

    def _required(self, name: str, value: Value | None) -> Value:
        if value is None:
            raise FedsimError(
                f"{name} is not set; it must be, to find the {self.unknown}: of noise multiplier, "
                "rounds and an epsilon, two determine the third."
            )
        return value


@dataclass(frozen=True)
class Answer:
    """Answer to a `Question`: noise multiplier, rounds and cost of the run."""

    question: Question
    noise_multiplier: float
    rounds: int
    cost: Cost

    @property
    def events(self) -> tuple[Event, ...]:
        """All events of the run, past ones included."""
        return self.question.events(self.noise_multiplier, self.rounds)


def _check_rounds(rounds: int) -> None:
    if not 1 <= rounds <= 10 * MAX_ROUNDS:
        raise FedsimError(f"rounds is {as_text(rounds)}; it must be from 1 to {10 * MAX_ROUNDS:,}.")


def _decreasing_root(
    f: Callable[[float], float], guess: float, low: float, high: float
) -> float | None:
    """``x`` with ``f(x) <= 0``, at most 1e-5 right of the root; None if none is in [low, high].

    It brackets outwards from the guess, and then uses false position (Illinois), which gains a
    digit or two with each step, since log epsilon is nearly linear in log z.
    """
    a, step = min(max(guess, low), high), 0.25
    fa = f(a)
    while True:
        b = min(max(a + math.copysign(step, fa), low), high)
        fb = f(b)
        if (fa > 0) != (fb > 0):
            break
        if b in (low, high):
            return None
        a, fa, step = b, fb, 2 * step
    (a, fa), (b, fb) = sorted([(a, fa), (b, fb)])
    nudge = 0.0
    while b - a > 1e-5:
        # Aim slightly beyond the root: the next point is then on its other side, and the bracket
        # closes from both ends. Halving f at an end that stays twice is the Illinois rule.
        x = (a * fb - b * fa) / (fb - fa) + nudge
        x = min(max(x, a + 4e-6), b - 4e-6)
        fx = f(x)
        if fx > 0:
            a, fa, fb, nudge = x, fx, fb / 2 if nudge > 0 else fb, 4e-6
        else:
            b, fb, fa, nudge = x, fx, fa / 2 if nudge < 0 else fa, -4e-6
    return b
