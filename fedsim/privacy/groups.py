"""What the releases cost an owner of several rows, as DP composes over groups."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from fedsim.errors import FedsimError
from fedsim.privacy.accountant import Accountant, check_delta
from fedsim.privacy.events import Event
from fedsim.privacy.laws.base import Law
from fedsim.privacy.losses import bisected, gaussian_epsilon

FINEST, COARSEST = 1e-4, 0.02
"""Steps of the grid of losses."""
LARGEST = 1e3
"""An epsilon beyond this is as good as none."""

GroupMethod = Literal["analytic", "pld", "chain", "none"]

_METHODS: Mapping[GroupMethod, str] = {
    "analytic": "the exact curve of a Gaussian with k times the sensitivity",
    "pld": "loss distributions of Gaussian mixtures over how many of them take part",
    "chain": "the general bound over k steps from neighbour to neighbour",
}


@dataclass(frozen=True)
class GroupCost:
    """(epsilon, delta) of groups of rows that are added or removed together.

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
    method: GroupMethod

    def sentence(self, row: str = "client") -> str:
        """In plain words."""
        if self.method == "none" or math.isinf(self.epsilon):
            return f"Owners of {self.size} {row}s: no guarantee."
        return (
            f"Owners of up to {self.size} {row}s: ({self.epsilon:.4g}, {self.delta:g})-"
            f"differentially private for all of them together, by {_METHODS[self.method]}."
        )


def group_cost(
    events: Iterable[Event] | Accountant, size: int, delta: float, *, chained: bool = False
) -> GroupCost:
    """What these events together cost a group of up to ``size`` rows.

    Without sampling ``size`` rows move a sum by at most k C: one Gaussian of k times the
    sensitivity, exactly. Of Poisson samples, in which rows are drawn independently, Binomial(k, q)
    of them take part: the pair ``sum_j P(j) N(j, z^2)`` and ``N(0, z^2)`` dominates (Ganesh 2024,
    arXiv 2401.10294, "Tight Group-Level DP Guarantees for DP-SGD with Sampling via Mixture of
    Gaussians Mechanisms"); its loss distributions are dp-accounting's, rounded up. Anything else
    has what (epsilon, delta) of one row implies over a chain of k neighbours: ``(k epsilon,
    (e^(k epsilon) - 1) / (e^epsilon - 1) delta)``, at the best epsilon.

    Parameters
    ----------
    chained : bool
        Use the chain: where it is not known that rows are drawn independently.

    Raises
    ------
    FedsimError
        If size or delta is out of range.

    Examples
    --------
    >>> event = Event(noise_multiplier=30.0, count=100)
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
    if chained or any(law.together(size) is None for law, _ in accountant.sampled):
        return GroupCost(size, _chain(accountant, size, delta), delta, "chain")
    epsilon = _mixtures(frozenset(accountant.sampled.items()), accountant.mu, size, delta)
    return GroupCost(size, epsilon, delta, "pld")


# Cached: the end of a run asks several times.
@lru_cache(maxsize=64)
def _mixtures(
    items: frozenset[tuple[tuple[Law, float], int]], mu: float, size: int, delta: float
) -> float:
    from dp_accounting.pld import privacy_loss_distribution as pld

    ratio = max([min(1.0, size * law.rate) / z for (law, z), _ in items] + [mu])
    step = float(np.clip(ratio / 40, FINEST, COARSEST))
    together = pld.identity(step)
    drawn = np.arange(size + 1).tolist()
    for (law, z), count in sorted(items, key=repr):
        once = pld.from_mixture_gaussian_mechanism(
            z, drawn, law.together(size), value_discretization_interval=step
        )
        together = together.compose(once.self_compose(count))
    if mu:
        plain = pld.from_gaussian_mechanism(1 / mu / size, value_discretization_interval=step)
        together = together.compose(plain)
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

    return size * bisected(holds, 1e-4, LARGEST / size, accountant.epsilon(delta))[1]
