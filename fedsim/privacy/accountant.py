"""The accountant: composes events, and gives their exact epsilon for one inverse transform."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedsim.arguments import as_text, check_arguments, expected, require
from fedsim.array_types import Floats
from fedsim.errors import FedsimError
from fedsim.privacy.events import Event, common_adjacency
from fedsim.privacy.laws.base import Adjacency, Law
from fedsim.privacy.losses import (
    SampledGaussian,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_rdp,
    rdp_delta,
    rdp_epsilon,
)
from fedsim.privacy.pld import Pairs, composed_delta, composed_epsilon, composed_profile

Method = Literal["analytic", "pld", "rdp", "none"]

# Rounding in the transforms is about 1e-16 of the mass for each release; below this delta it
# would no longer be negligible, and RDP is used instead.
MIN_PLD_DELTA = 1e-10
# Points of a profile without loss distributions. Any number is valid (see `tradeoff.TradeOff`).
PROFILE_POINTS = 257
# More noise is charged as MAX_NOISE; less than MIN_NOISE counts as none.
MIN_NOISE, MAX_NOISE = 1e-6, 1e8
# Each distinct pair of law and noise costs a transform. Noise that changes every round (a schedule,
# a split that follows the cohort) makes thousands of them. Beyond this number, noise is rounded
# down to steps of 1 %, which gives an upper bound on epsilon; if there are still more, RDP is used.
MAX_EXACT = 100
# The limit for Rényi curves is lower, since dp-accounting takes about 0.1 s for each.
MAX_EXACT_RDP = 10


@dataclass(frozen=True)
class Cost:
    """(epsilon, delta) of a composition, and the accounting method.

    Attributes
    ----------
    epsilon : float
        The smallest valid bound; infinite where a release had no guarantee.
    delta : float
    adjacency : "add-remove", "zero-out" or "replace-one"
    method : "analytic", "pld", "rdp" or "none"
        Accounting method of epsilon; "none" where a release had no guarantee.
    rdp_epsilon : float
        Epsilon of the same events by Rényi accounting.
    poisson_epsilon : float or None
        For cohorts that cost more than independent draws, such as those of a fixed size: epsilon
        of Poisson cohorts of the same expected size, under add-remove. Else None.
    releases : int
        Invocations composed.
    """

    epsilon: float
    delta: float
    adjacency: Adjacency
    method: Method
    rdp_epsilon: float
    poisson_epsilon: float | None
    releases: int


class Accountant:
    """Composes events, in any order and mixture that have a common adjacency.

    Unamplified Gaussians are combined into one which, if there is nothing else, is accounted for
    analytically. If all laws have dominating pairs, their privacy loss distributions (PLD) are
    composed, with RDP as a cross-check; if one has none, RDP is used. Side scalars, changing noise
    and repeated invocations are all events.

    The time of `add` and `epsilon` does not grow with the number of events before, except for the
    first use of a law at a new noise multiplier.

    Not for noise that is chosen after looking at releases: composition theorems for PLDs assume it
    fixed in advance. Use RDP (``cost().rdp_epsilon``) with a budget as a privacy filter then.

    Parameters
    ----------
    events : iterable of Event
        First events to compose.
    """

    @check_arguments
    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.releases = 0
        """Invocations composed so far."""
        self.private = True
        """Whether every release so far has a guarantee."""
        self.sampled: dict[tuple[Law, float], int] = {}
        """Invocations by law and noise multiplier; without plain Gaussians."""
        self._ladder: dict[tuple[Law, float], int] = {}  # the same, with the noise rounded down
        self._precision = 0.0  # sum of mu^2 over plain Gaussians
        self._adjacencies: frozenset[Adjacency] = frozenset()
        for event in events:
            self.add(event)

    def add(self, event: Event, count: int = 1) -> None:
        """Compose ``count`` more of this event.

        Raises
        ------
        FedsimError
            If its adjacency does not compose with that of earlier events.
        """
        count *= checked_event(event).count
        law, z, private = event.law, event.total_noise_multiplier, event.private
        if law.is_gaussian and 0 < z < math.inf:  # outside the computable range cost is rounded up
            z, private = min(z, MAX_NOISE), private and z >= MIN_NOISE
        if private:
            adjacencies = self._adjacencies | {event.adjacency}
            common_adjacency(adjacencies)
            self._adjacencies = adjacencies
        self.releases += count
        self.private = self.private and private
        if not count or not private or math.isinf(z):
            return
        mu = law.gaussian(z)
        if mu is not None:
            self._precision += count * mu**2
            return
        # Only a law that can be evaluated at any multiplier may be moved down the ladder.
        rounded = 1.01 ** math.floor(math.log(z) / math.log(1.01)) if law.is_gaussian else z
        self.sampled[law, z] = self.sampled.get((law, z), 0) + count
        self._ladder[law, rounded] = self._ladder.get((law, rounded), 0) + count

    def copy(self) -> Accountant:
        """An independent accountant of the same events."""
        clone = copy(self)
        clone.sampled, clone._ladder = dict(self.sampled), dict(self._ladder)
        return clone

    @property
    def adjacency(self) -> Adjacency:
        """The adjacency under which all events so far are composed."""
        return common_adjacency(self._adjacencies)

    @property
    def mu(self) -> float:
        """Sensitivity over standard deviation of all plain Gaussians, which compose to one."""
        return math.sqrt(self._precision)

    @property
    def gaussian_mu(self) -> float | None:
        """`mu`, if all events are plain Gaussians with a guarantee; else None."""
        return None if self.sampled or not self.private else self.mu

    def epsilon(self, delta: float) -> float:
        """Epsilon spent so far at ``delta``."""
        check_delta(delta)
        return self._best(delta)[0]

    def cost(self, delta: float) -> Cost:
        """Epsilon spent so far at ``delta``, with its method and the figures to compare it with."""
        check_delta(delta)
        best, method = self._best(delta)
        rdp = rdp_epsilon(self._rdp(), delta) if self.private else math.inf
        poisson = self._as_poisson()
        poisson_epsilon = None if poisson is None else poisson.epsilon(delta)
        return Cost(best, delta, self.adjacency, method, rdp, poisson_epsilon, self.releases)

    def _best(self, delta: float) -> tuple[float, Method]:
        """Epsilon by the tightest method that applies, and that method."""
        if not self.private:
            return math.inf, "none"
        if not self.sampled:
            return gaussian_epsilon(self.mu, delta), "analytic"
        pairs = self._pairs()
        if pairs is not None and delta >= MIN_PLD_DELTA:
            return composed_epsilon(pairs, delta), "pld"
        return rdp_epsilon(self._rdp(), delta), "rdp"

    @check_arguments
    def delta(self, epsilon: float) -> float:
        """Smallest delta known at ``epsilon >= 0``."""
        if not epsilon >= 0:
            raise FedsimError(f"epsilon is {epsilon}; it must be at least 0.")
        if not self.private:
            return 1.0
        if not self.sampled:
            return gaussian_delta(self.mu, epsilon)
        pairs = self._pairs()
        delta = composed_delta(pairs, epsilon) if pairs is not None else 0.0
        return delta if delta >= MIN_PLD_DELTA else rdp_delta(self._rdp(), epsilon)

    def profile(self) -> tuple[Floats, Floats]:
        """The privacy profile: epsilons ascending from 0, and a valid delta at each.

        Returns
        -------
        tuple of float64 ``[points]``
            Both are empty if a release had no guarantee. Deltas are not below 1e-10.
        """
        if not self.private:
            return np.empty(0), np.empty(0)
        pairs = self._pairs()
        if self.sampled and pairs is not None:
            epsilons, deltas = composed_profile(pairs)
        else:
            epsilons = np.linspace(0.0, self.epsilon(MIN_PLD_DELTA), PROFILE_POINTS)
            deltas = np.array([self.delta(float(epsilon)) for epsilon in epsilons])
        return epsilons, np.clip(deltas, MIN_PLD_DELTA, 1.0)

    def would_exceed(self, event: Event, max_epsilon: float, delta: float) -> bool:
        """Whether composing ``event`` would spend more than ``max_epsilon``."""
        total = self.copy()
        total.add(event)
        return total.epsilon(delta) > max_epsilon

    def _rdp(self) -> Floats:
        total = gaussian_rdp(self.mu)
        sampled = self.sampled if len(self.sampled) <= MAX_EXACT_RDP else self._ladder
        for (law, z), count in sampled.items():
            total = total + count * law.rdp(z)
        return total

    def _pairs(self) -> Mapping[Pairs, int] | None:
        """How often to compose each release's dominating pairs; None where PLDs do not apply."""
        composed: dict[Pairs, int] = {}
        sampled = self.sampled if len(self.sampled) <= MAX_EXACT else self._ladder
        for (law, z), count in sampled.items():
            pairs = law.pairs(z)
            if pairs is None:
                return None
            composed[pairs] = composed.get(pairs, 0) + count
        if len(composed) > MAX_EXACT:
            return None
        if self.mu:
            gaussian = SampledGaussian(1.0, 1 / self.mu).both_directions
            composed[gaussian] = composed.get(gaussian, 0) + 1
        return composed

    def _as_poisson(self) -> Accountant | None:
        """Accountant of Poisson sampling at the same noise and rates, under add-remove."""
        poisson = Accountant()
        for (law, z), count in self.sampled.items():
            cheaper = law.as_poisson()
            if cheaper is None:
                return None
            poisson.add(Event(noise_multiplier=z, law=cheaper), count)
        if not self.sampled:
            return None
        if self.mu:  # a full cohort's releases under replace-one, where mu is 2/z
            poisson.add(Event(noise_multiplier=2 / self.mu))
        return poisson


def checked_event(event: Event) -> Event:
    """The event itself; anything else is refused."""
    if not isinstance(event, Event):
        raise FedsimError(f"an event is {as_text(event)}; it must be a fedsim.privacy.Event.")
    return event


def check_delta(delta: float) -> None:
    """Refuse a delta outside (0, 1)."""
    require("delta", delta, expected(float))
    if not 0 < delta < 1:
        raise FedsimError(f"delta is {delta}; it must lie strictly between 0 and 1.")
