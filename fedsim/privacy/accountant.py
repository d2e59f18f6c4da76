"""The accountant: what a list of events has cost, exactly, at the price of one transform."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, cast

import numpy as np

from fedsim.errors import FedsimError
from fedsim.privacy.analytic import gaussian_delta, gaussian_epsilon
from fedsim.privacy.events import Adjacency, Event, common_adjacency
from fedsim.privacy.pld import Component, composed_delta, composed_epsilon, composed_profile
from fedsim.privacy.prv import prv_epsilon
from fedsim.privacy.rdp import (
    Array,
    fixed_rdp,
    gaussian_rdp,
    poisson_rdp,
    rdp_delta,
    rdp_epsilon,
)

__all__ = ["Accountant", "Cost", "Method", "check_delta"]

Method = Literal["analytic", "pld", "rdp", "none"]

# Rounding in the transforms is about 1e-16 of the mass a release; below this delta it
# would no longer be negligible, and RDP takes over.
SMALLEST_PLD_DELTA = 1e-10
# Of a profile without loss distributions; lines through them are valid, however few.
PROFILE_POINTS = 257
# Beyond this number of distinct (rate, noise) pairs, the noise is rounded down to a 1 % ladder,
# and where that does not make them fewer, RDP alone is used.
MOST_EXACT = 100
# Rényi accounting, a second beside, takes far longer over a pair.
MOST_EXACT_RDP = 10


@dataclass(frozen=True)
class Cost:
    """(epsilon, delta), and how it was found.

    Attributes
    ----------
    epsilon : float
        The smallest valid bound; infinite where a release had no guarantee.
    delta : float
    adjacency : "add-remove", "zero-out" or "replace-one"
    method : "analytic", "pld", "rdp" or "none"
        Where epsilon comes from; "none" when a release had no guarantee.
    rdp_epsilon : float
        What Rényi accounting says of the same events.
    poisson_epsilon : float or None
        For fixed-size cohorts: what Poisson cohorts of the same expected size would have
        cost, under add-remove.
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

    Unamplified Gaussians are folded into one and, alone, accounted for analytically.
    Poisson-sampled ones go through loss distributions (PLD) with RDP as a cross-check;
    fixed-size samples through RDP under replace-one. Side scalars, changing noise and
    repeated invocations are all events.

    The cost of `add` and `epsilon` does not grow with what was added before, except for the
    first look at a new (rate, noise) pair.

    Not for noise chosen after looking at releases: composition theorems assume it fixed in
    advance; use RDP (``cost().rdp_epsilon``) with a budget as a filter there.

    Parameters
    ----------
    events : iterable of Event
        Composed at once.
    """

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._spent = _Spent()
        for event in events:
            self.add(event)

    def add(self, event: Event, count: int = 1) -> None:
        """Compose ``count`` more of this event.

        Raises
        ------
        FedsimError
            If its adjacency does not compose with that of earlier events.
        """
        self._spent.add(event, event.count * count)

    def copy(self) -> Accountant:
        """An accountant that goes on from here on its own."""
        clone = Accountant()
        clone._spent = self._spent.copy()
        return clone

    @property
    def releases(self) -> int:
        """Invocations composed so far."""
        return self._spent.releases

    @property
    def adjacency(self) -> Adjacency:
        """The relation that everything so far is accounted for."""
        return common_adjacency(self._spent.adjacencies)

    def epsilon(self, delta: float) -> float:
        """Epsilon spent so far at ``delta``."""
        check_delta(delta)
        return self._best(delta)[0]

    def cost(self, delta: float) -> Cost:
        """Epsilon spent so far at ``delta``, how it was found, and what stands beside it."""
        check_delta(delta)
        spent, adjacency = self._spent, self.adjacency
        best, method = self._best(delta)
        rdp = rdp_epsilon(spent.rdp(), delta) if spent.private else math.inf
        beside = spent.as_poisson().epsilon(delta) if spent.fixed else None
        return Cost(best, delta, adjacency, method, rdp, beside, self.releases)

    def prv_epsilon(self, delta: float) -> float | None:
        """Opacus's opinion, by its accountant of privacy random variables; loads torch.

        Returns
        -------
        float or None
            An upper bound; None where it does not apply: without a guarantee, and for cohorts of
            a fixed size.
        """
        check_delta(delta)
        components = self._spent.components() if self._spent.private else None
        return None if components is None else prv_epsilon(components, delta)

    def delta(self, epsilon: float) -> float:
        """Smallest delta known at ``epsilon >= 0``."""
        if not epsilon >= 0:
            raise FedsimError(f"epsilon is {epsilon}; it must be at least 0.")
        spent = self._spent
        if not spent.private:
            return 1.0
        if spent.analytic:
            return gaussian_delta(spent.mu, epsilon)
        components = spent.components()
        delta = composed_delta(components, epsilon) if components is not None else 0.0
        return delta if delta >= SMALLEST_PLD_DELTA else rdp_delta(spent.rdp(), epsilon)

    @property
    def private(self) -> bool:
        """Whether every release so far has a guarantee."""
        return self._spent.private

    @property
    def components(self) -> Mapping[Component, int] | None:
        """How often which Poisson-sampled Gaussian was composed; None where others were too."""
        return self._spent.components() if self._spent.private else None

    @property
    def gaussian_mu(self) -> float | None:
        """Sensitivity in standard deviations, where everything so far is one Gaussian."""
        return self._spent.mu if self._spent.private and self._spent.analytic else None

    def profile(self) -> tuple[Array, Array]:
        """All that is known at once: epsilons ascending from 0, and a valid delta at each.

        Returns
        -------
        tuple of float64 ``[points]``
            Both empty where a release had no guarantee. Deltas are not below 1e-10.
        """
        spent = self._spent
        if not spent.private:
            return np.empty(0), np.empty(0)
        components = spent.components()
        if not spent.analytic and components is not None:
            epsilons, deltas = composed_profile(components)
        else:
            epsilons = np.linspace(0.0, self.epsilon(SMALLEST_PLD_DELTA), PROFILE_POINTS)
            deltas = np.array([self.delta(float(epsilon)) for epsilon in epsilons])
        return epsilons, np.clip(deltas, SMALLEST_PLD_DELTA, 1.0)

    def _best(self, delta: float) -> tuple[float, Method]:
        spent = self._spent
        if not spent.private:
            return math.inf, "none"
        if spent.analytic:
            return gaussian_epsilon(spent.mu, delta), "analytic"
        components = spent.components()
        if components is not None and delta >= SMALLEST_PLD_DELTA:
            return composed_epsilon(components, delta), "pld"
        return rdp_epsilon(spent.rdp(), delta), "rdp"

    def would_exceed(self, event: Event, max_epsilon: float, delta: float) -> bool:
        """Whether composing ``event`` would spend more than ``max_epsilon``."""
        after = self.copy()
        after.add(event)
        return after.epsilon(delta) > max_epsilon


def check_delta(delta: float) -> None:
    """Refuse a delta outside (0, 1)."""
    if not 0 < delta < 1:
        raise FedsimError(f"delta is {delta}; it must lie strictly between 0 and 1.")


@dataclass
class _Spent:
    """A composition, sorted by what accounts for it; every `add` costs the same."""

    releases: int = 0
    private: bool = True
    adjacencies: set[Adjacency] = field(default_factory=set)
    precision: float = 0.0  # sum of 1/z^2 over unamplified Gaussians, in units of the change
    poisson: dict[Component, int] = field(default_factory=dict)
    ladder: dict[Component, int] = field(default_factory=dict)  # poisson, noise rounded down
    fixed: dict[tuple[int, int, float], int] = field(default_factory=dict)

    def add(self, event: Event, count: int) -> None:
        if not event.private:
            self.private = False
            self.releases += count
            return
        relations = {*self.adjacencies, event.relation}
        common_adjacency(relations)
        self.adjacencies = relations
        self.releases += count
        z = event.total_noise_multiplier
        if event.rate == 1 and not math.isinf(z):
            # Replacing a row moves the sum by 2C: noise z/2 in units of the change.
            mu = 2 / z if event.relation == "replace-one" else 1 / z
            self.precision += count * mu**2
        elif event.sampler == "fixed" and not math.isinf(z):
            key = (cast(int, event.size), cast(int, event.population), z)
            self.fixed[key] = self.fixed.get(key, 0) + count
        elif not math.isinf(z):
            component = Component(event.rate, z)
            rounded = Component(event.rate, _rounded_down(z))
            self.poisson[component] = self.poisson.get(component, 0) + count
            self.ladder[rounded] = self.ladder.get(rounded, 0) + count

    def copy(self) -> _Spent:
        return replace(
            self, poisson=dict(self.poisson), ladder=dict(self.ladder), fixed=dict(self.fixed)
        )

    @property
    def mu(self) -> float:
        return math.sqrt(self.precision)

    def rdp(self) -> Array:
        total = gaussian_rdp(self.mu)
        poisson = self.poisson if len(self.poisson) <= MOST_EXACT_RDP else self.ladder
        for component, count in poisson.items():
            total = total + count * poisson_rdp(component.rate, component.noise_multiplier)
        for (size, population, z), count in self.fixed.items():
            total = total + count * fixed_rdp(size, population, z)
        return total

    @property
    def analytic(self) -> bool:
        return not self.poisson and not self.fixed

    def components(self) -> Mapping[Component, int] | None:
        """What loss distributions are to compose; None where they do not apply."""
        components = dict(self.poisson if len(self.poisson) <= MOST_EXACT else self.ladder)
        if self.fixed or len(components) > MOST_EXACT:
            return None
        if self.mu:
            gaussian = Component(1.0, 1 / self.mu)
            components[gaussian] = components.get(gaussian, 0) + 1
        return components

    def as_poisson(self) -> Accountant:
        """The same noise on Poisson samples of the same rates, under add-remove."""
        poisson = Accountant()
        for (size, population, z), count in self.fixed.items():
            poisson.add(Event(noise_multiplier=z, rate=size / population), count)
        if self.mu:  # replace-one's, so that mu is 2/z
            poisson.add(Event(noise_multiplier=2 / self.mu))
        return poisson


def _rounded_down(z: float) -> float:
    return float(1.01 ** math.floor(math.log(z) / math.log(1.01)))
