"""What a person is promised who owns several rows: group privacy of a composition of events."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from fedsim.errors import FedsimError
from fedsim.privacy.accountant import Accountant, check_delta
from fedsim.privacy.analytic import gaussian_epsilon
from fedsim.privacy.events import Event
from fedsim.privacy.pld import Component

__all__ = ["GroupCost", "group_cost"]

FINEST, COARSEST = 1e-4, 0.02
"""Steps of the grid of losses."""
LARGEST = 1e3
"""Beyond this epsilon nothing is told apart from nothing at all."""

Method = Literal["analytic", "pld", "chain", "none"]

_METHODS: Mapping[Method, str] = {
    "analytic": "the exact curve of a Gaussian with k times the sensitivity",
    "pld": "loss distributions of Gaussian mixtures over how many of them take part",
    "chain": "the general bound over k steps from neighbour to neighbour",
}


@dataclass(frozen=True)
class GroupCost:
    """(epsilon, delta) of groups of rows that come and go together.

    Attributes
    ----------
    size : int
        k, the most rows of one owner.
    epsilon, delta : float
    method : "analytic", "pld", "chain" or "none"
        How it was found; "none" where a release has no guarantee.
    """

    size: int
    epsilon: float
    delta: float
    method: Method

    def sentence(self, row: str = "client") -> str:
        """In plain words."""
        if self.method == "none" or math.isinf(self.epsilon):
            return f"Whoever owns {self.size} {row}s: nothing is promised."
        return (
            f"Whoever owns up to {self.size} {row}s: ({self.epsilon:.4g}, {self.delta:g})-"
            f"differentially private for all of them together, by {_METHODS[self.method]}."
        )


def group_cost(
    events: Iterable[Event] | Accountant, size: int, delta: float, *, chained: bool = False
) -> GroupCost:
    """What these events together promise a group of up to ``size`` rows.

    Everybody taking part, ``size`` rows move a sum by at most k C: one Gaussian of k times the
    sensitivity, exactly. Of Poisson samples, in which rows are drawn independently, Binomial(k, q)
    of them take part: the pair ``sum_j P(j) N(j, z^2)`` and ``N(0, z^2)`` dominates (Ganesh 2024,
    arXiv 2401.10294, "Tight Group-Level DP Guarantees for DP-SGD with Sampling via Mixture of
    Gaussians Mechanisms"); its loss distributions are dp-accounting's, rounded up. For all else
    there is what (epsilon, delta) of one row implies along k neighbours: ``(k epsilon,
    (e^(k epsilon) - 1) / (e^epsilon - 1) delta)``, at the best epsilon.

    Parameters
    ----------
    chained : bool
        Take the last way: where nothing says that rows are drawn independently.

    Raises
    ------
    FedsimError
        If size or delta is out of range.

    Examples
    --------
    >>> event = Event(noise_multiplier=30.0, sampler="full", count=100)
    >>> round(group_cost([event], 3, 1e-5).epsilon, 4)
    4.3772
    """
    check_delta(delta)
    if size < 1:
        raise FedsimError(f"a group is of {size} rows; it must be of 1 or more.")
    accountant = events if isinstance(events, Accountant) else Accountant(events)
    if not accountant.private:
        return GroupCost(size, math.inf, delta, "none")
    mu = accountant.gaussian_mu
    if mu is not None:
        epsilon = gaussian_epsilon(size * mu, delta) if mu else 0.0
        return GroupCost(size, epsilon, delta, "analytic")
    components = accountant.components
    if components is None or chained:
        return GroupCost(size, _chain(accountant, size, delta), delta, "chain")
    epsilon = _mixtures(frozenset(components.items()), size, delta)
    return GroupCost(size, epsilon, delta, "pld")


# Kept: a run's end asks several times.
@lru_cache(maxsize=64)
def _mixtures(items: frozenset[tuple[Component, int]], size: int, delta: float) -> float:
    from dp_accounting.pld import privacy_loss_distribution as pld
    from scipy.stats import binom  # half a second that no other accounting waits for

    ratio = max(min(1.0, size * c.rate) / c.noise_multiplier for c, _ in items)
    step = float(np.clip(ratio / 40, FINEST, COARSEST))
    together = pld.identity(step)
    drawn = np.arange(size + 1)
    for component, count in sorted(items, key=repr):
        q, z = component.rate, component.noise_multiplier
        if q == 1:
            once = pld.from_gaussian_mechanism(z / size, value_discretization_interval=step)
        else:
            once = pld.from_mixture_gaussian_mechanism(
                z, drawn.tolist(), binom.pmf(drawn, size, q), value_discretization_interval=step
            )
        together = together.compose(once.self_compose(count))
    return float(together.get_epsilon_for_delta(delta))


def _chain(accountant: Accountant, size: int, delta: float) -> float:
    """The least k epsilon at which the chain's delta is small enough; valid at any epsilon."""

    def holds(epsilon: float) -> bool:
        one = accountant.delta(epsilon)
        if one <= 0:
            return True
        # log of 1 + e^epsilon + ... + e^((k - 1) epsilon)
        terms = np.logaddexp.reduce(epsilon * np.arange(size))
        return bool(math.log(one) + terms <= math.log(delta))

    high = accountant.epsilon(delta)
    while not holds(high):
        high = 2 * high if high else 1e-3
        if size * high > LARGEST:
            return math.inf
    low = 0.0
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return size * high if holds(high) else math.inf
