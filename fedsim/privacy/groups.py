"""Group privacy: the guarantee for an owner of several rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from fedsim.arguments import check_arguments
from fedsim.errors import FedsimError
from fedsim.privacy.accountant import Accountant, check_delta
from fedsim.privacy.events import Event
from fedsim.privacy.laws.base import Law
from fedsim.privacy.losses import bisect_interval, gaussian_epsilon

FINEST, COARSEST = 1e-4, 0.02
"""Least and largest step of the grid of losses."""
LARGEST = 1e3
"""The search for epsilon ends here: a larger one is no guarantee in practice."""


@check_arguments
def group_epsilon(
    events: Iterable[Event] | Accountant, size: int, delta: float, *, chained: bool = False
) -> float:
    """Epsilon of a composition of events for an owner of up to ``size`` rows, for all together.

    The events are those of a plan (``plan.event().over_rounds(rounds)``), or of a ledger's lines
    (`Statement.events`).

    Without sampling, k rows move a sum by at most k C: exactly a Gaussian of k times the
    sensitivity. Under Poisson sampling, where rows are drawn independently, Binomial(k, q) of them
    take part, and the pair ``sum_j P(j) N(j, z^2)`` and ``N(0, z^2)`` dominates (Ganesh 2024,
    arXiv 2401.10294, "Tight Group-Level DP Guarantees for DP-SGD with Sampling via Mixture of
    Gaussians Mechanisms"); dp-accounting composes its loss distributions, rounded up. For any
    other law, the (epsilon, delta) of one row is chained over k neighbours: ``(k epsilon,
    (e^(k epsilon) - 1) / (e^epsilon - 1) delta)``, at the best epsilon.

    Parameters
    ----------
    events : iterable of Event, or Accountant
    size : int
        k, the largest number of rows of one owner.
    delta : float
    chained : bool
        Always use the chain: for samplers of your own, which may draw rows of one owner together.

    Returns
    -------
    float
        Infinite where a release has no guarantee.

    Raises
    ------
    FedsimError
        If size or delta is out of range.

    Examples
    --------
    >>> event = Event(noise_multiplier=30.0, count=100)
    >>> round(group_epsilon([event], 3, 1e-5), 4)
    4.3772
    """
    check_delta(delta)
    if size < 1:
        raise FedsimError(f"a group has {size} rows; it must have 1 or more.")
    accountant = events if isinstance(events, Accountant) else Accountant(events)
    if not accountant.private:
        return math.inf
    mu = accountant.gaussian_mu
    if mu is not None:
        return gaussian_epsilon(size * mu, delta) if mu else 0.0
    if chained or any(law.group_sampling(size) is None for law, _ in accountant.sampled):
        return _chain(accountant, size, delta)
    return _mixtures(accountant.sampled, accountant.mu, size, delta)


def _mixtures(
    sampled: Mapping[tuple[Law, float], int], mu: float, size: int, delta: float
) -> float:
    """Epsilon of sampled releases, by mixtures over how many of the group's rows take part."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    # The grid has 40 steps in the largest ratio of a mean shift to its noise, about the standard
    # deviation of the loss.
    ratio = max([min(1.0, size * law.rate) / z for law, z in sampled] + [mu])
    step = float(np.clip(ratio / 40, FINEST, COARSEST))
    total = pld.identity(step)
    row_counts = np.arange(size + 1).tolist()
    for (law, z), count in sorted(sampled.items(), key=repr):
        release = pld.from_mixture_gaussian_mechanism(
            z, row_counts, law.group_sampling(size), value_discretization_interval=step
        )
        total = total.compose(release.self_compose(count))
    if mu:
        gaussian = pld.from_gaussian_mechanism(1 / mu / size, value_discretization_interval=step)
        total = total.compose(gaussian)
    return float(total.get_epsilon_for_delta(delta))


def _chain(accountant: Accountant, size: int, delta: float) -> float:
    """Least k * epsilon at which the chain's delta is small enough; each epsilon gives a bound."""

    def holds(epsilon: float) -> bool:
        single_delta = accountant.delta(epsilon)
        if single_delta <= 0:
            return True
        # log of 1 + e^epsilon + ... + e^((k - 1) epsilon)
        terms = np.logaddexp.reduce(epsilon * np.arange(size))
        return bool(math.log(single_delta) + terms <= math.log(delta))

    return size * bisect_interval(holds, 1e-4, LARGEST / size, accountant.epsilon(delta))[1]
