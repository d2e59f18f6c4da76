"""Questions asked before a run: epsilon of a plan, noise for a target, rounds for a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from fedsim.errors import FedsimError
from fedsim.privacy.accountant import Accountant, Cost, check_delta
from fedsim.privacy.analytic import gaussian_mu
from fedsim.privacy.events import Event

__all__ = [
    "calibrate",
    "calibrate_events",
    "cost",
    "epsilon",
    "rounds_within",
    "rounds_within_events",
]

# Calibrated noise is searched here; beyond, the target or the plan is a mistake.
LEAST_NOISE, MOST_NOISE = 1e-2, 1e7
MOST_ROUNDS = 10**8


class Samples(Protocol):
    """Anything that emits the event of its own draw: a cohort of `fedsim.cohorts`."""

    @property
    def rate(self) -> float:
        """Sampling rate."""

    def event(
        self,
        noise_multiplier: float,
        *,
        count: int = 1,
        sides: Mapping[str, float] | None = None,
        guarantee: bool = True,
    ) -> Event:
        """What one release costs."""


def epsilon(*, noise_multiplier: float, cohort: Samples, rounds: int, delta: float) -> float:
    """Epsilon at ``delta`` of ``rounds`` releases, one a cohort.

    Parameters
    ----------
    noise_multiplier : float
        Standard deviation of the noise on the sum divided by the clip norm.
    cohort : PoissonCohort, FixedCohort or FullCohort
        It says the adjacency too.
    rounds : int
        Releases; at example level, mechanism invocations (two an ADADP iteration).
    delta : float

    Examples
    --------
    >>> from fedsim.cohorts import PoissonCohort
    >>> round(epsilon(noise_multiplier=1.1, cohort=PoissonCohort(0.01), rounds=1000, delta=1e-5), 3)
    1.515
    """
    return _plan(noise_multiplier, cohort, rounds).epsilon(delta)


def cost(*, noise_multiplier: float, cohort: Samples, rounds: int, delta: float) -> Cost:
    """`epsilon`, with how it was found and what stands beside it."""
    return _plan(noise_multiplier, cohort, rounds).cost(delta)


def _plan(noise_multiplier: float, cohort: Samples, rounds: int) -> Accountant:
    _check_rounds(rounds)
    return Accountant([cohort.event(noise_multiplier).times(rounds)])


def calibrate(*, target_epsilon: float, cohort: Samples, rounds: int, delta: float) -> float:
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
        lambda z: [cohort.event(z).times(rounds)], target_epsilon=target_epsilon, delta=delta
    )


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
        For plans that are not one event a round: noise that changes over rounds, a release
        of its own beside the training. More ``z`` must mean more noise.
    target_epsilon, delta : float
    adaptive : bool
        Whether some of the events lie in the past, so that the noise is chosen after looking
        at releases. Loss distributions compose noise fixed in advance only; Rényi accounting
        is used instead.

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
        spent = accountant.cost(delta).rdp_epsilon if adaptive else accountant.epsilon(delta)
        return math.log(max(spent, 1e-9) / target_epsilon)

    # A first guess: all releases as one Gaussian, scaled by the rate as amplification is.
    rates = [(event.rate, event.count) for event in events(1.0)]
    mu = math.sqrt(sum(count * rate**2 for rate, count in rates))
    guess = math.log(max(mu / gaussian_mu(target_epsilon, delta), 0.3))
    log_z = _decreasing_root(excess, guess, math.log(LEAST_NOISE), math.log(MOST_NOISE))
    if log_z is None:
        raise FedsimError(
            f"target epsilon is {target_epsilon} at delta {delta}; no noise multiplier between "
            f"{LEAST_NOISE} and {MOST_NOISE:g} meets it exactly: give the multiplier itself."
        )
    return math.exp(log_z)


def rounds_within(
    *, max_epsilon: float, noise_multiplier: float, cohort: Samples, delta: float
) -> int:
    """Most rounds whose epsilon does not exceed the budget; 0 if one already does."""
    event = cohort.event(noise_multiplier)
    return rounds_within_events([], event, max_epsilon=max_epsilon, delta=delta)


def rounds_within_events(
    past: Iterable[Event], event: Event, *, max_epsilon: float, delta: float
) -> int:
    """Most rounds of ``event`` that a budget still buys after ``past``; 0 if none.

    Raises
    ------
    FedsimError
        If it buys more than 10^8.
    """
    check_delta(delta)
    if not 0 < max_epsilon < math.inf:
        raise FedsimError(f"max epsilon is {max_epsilon}; it must be positive and finite.")
    before = Accountant(past)

    def fits(rounds: int) -> bool:
        return not before.would_exceed(event.times(rounds), max_epsilon, delta)

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
        if high > MOST_ROUNDS:
            raise FedsimError(
                f"max epsilon is {max_epsilon}; it buys more than {MOST_ROUNDS:,} rounds at a "
                f"noise multiplier of {event.noise_multiplier}, and needs no planning."
            )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _check_rounds(rounds: int) -> None:
    if rounds != int(rounds) or rounds < 1:
        raise FedsimError(f"rounds is {rounds}; it must be a whole number, 1 or more.")


def _decreasing_root(
    f: Callable[[float], float], guess: float, low: float, high: float
) -> float | None:
    """``x`` with ``f(x) <= 0`` within 1e-5 right of the root; None if not in [low, high].

    Brackets outwards from the guess, then false position (Illinois), which gains a digit or
    two a step on these nearly straight curves.
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
        # Aim a little beyond the root, so that the bracket closes from both sides.
        x = (a * fb - b * fa) / (fb - fa) + nudge
        x = min(max(x, a + 4e-6), b - 4e-6)
        fx = f(x)
        if fx > 0:
            a, fa, fb, nudge = x, fx, fb / 2 if nudge > 0 else fb, 4e-6
        else:
            b, fb, fa, nudge = x, fx, fa / 2 if nudge < 0 else fa, -4e-6
    return b
