"""Privacy cost of model selection: only the best of a random number of runs is published.

If the number of runs is random and all but the best stay secret, the cost is little more than one
run's, and far less than that of publishing all of them (Liu and Talwar 2019).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from fedsim.arguments import check_arguments
from fedsim.errors import FedsimError
from fedsim.privacy.accountant import Accountant, check_delta
from fedsim.privacy.events import Event
from fedsim.privacy.laws.base import Law
from fedsim.privacy.losses import ORDERS, SampledGaussian, without_warnings

Distribution = Literal["logarithmic", "geometric", "poisson"]

_SHAPES: Mapping[str, float] = {"logarithmic": 0.0, "geometric": 1.0, "poisson": math.inf}
"""Shapes of dp-accounting's negative binomial distributions."""


@check_arguments
def selection_epsilon(
    events: Iterable[Event] | Accountant,
    mean: float,
    delta: float,
    *,
    distribution: Distribution = "logarithmic",
) -> float:
    """Epsilon of the best of a random number of runs, if nothing else of any run is revealed.

    Guarantee: that of Papernot and Steinke (2022, Theorems 2 and 6), by Rényi accounting with
    dp-accounting's ``RepeatAndSelectDpEvent``, if

    - the number of runs is drawn from ``distribution``, and stays secret;
    - each run's settings are drawn at random from a fixed list, with replacement;
    - all runs cost what ``events`` say, with noise from the operating system;
    - they are compared on public data (`data.validation` of examples that no client has).

    Parameters
    ----------
    events : iterable of Event, or Accountant
        All releases of one run: ``[plan.event().over_rounds(rounds)]`` of its release plan.
    mean : float
        Mean number of runs, above 1.
    delta : float
    distribution : "logarithmic", "geometric" or "poisson"
        Poisson costs least for up to about 5 runs; their number may then be 0, and nothing is
        published. Beyond that logarithmic does.

    Returns
    -------
    float
        Infinite where a release has no guarantee.

    Raises
    ------
    FedsimError
        If the mean, delta or distribution is out of range, or sampling is neither Poisson's nor
        without amplification.

    Examples
    --------
    >>> from fedsim.privacy.laws import PoissonLaw
    >>> run = Event(noise_multiplier=1.1, law=PoissonLaw(rate=0.01), count=1000)
    >>> round(selection_epsilon([run], 10, 1e-5), 4)
    2.9189
    """
    check_delta(delta)
    if not 1 < mean < math.inf:
        raise FedsimError(f"the mean number of runs is {mean:g}; it must be above 1.")
    accountant = events if isinstance(events, Accountant) else Accountant(events)
    if not accountant.private:
        return math.inf
    from dp_accounting.dp_event import ComposedDpEvent, GaussianDpEvent, RepeatAndSelectDpEvent
    from dp_accounting.rdp import RdpAccountant

    releases = [_sampled(law, z, count) for (law, z), count in accountant.sampled.items()]
    if accountant.mu:
        releases.append(GaussianDpEvent(1 / accountant.mu))
    event = RepeatAndSelectDpEvent(ComposedDpEvent(releases), mean, _SHAPES[distribution])
    with without_warnings():  # an order that cannot be computed is left out, which is valid
        selected = RdpAccountant(ORDERS).compose(event)
    return float(selected.get_epsilon(delta))


def _sampled(law: Law, z: float, count: int) -> Any:
    """dp-accounting's event of ``count`` sampled releases."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent

    pairs = law.pairs(z)
    removed = None if pairs is None else pairs[0]
    if not isinstance(removed, SampledGaussian):
        raise FedsimError(
            f"sampling is {law.label}; the cost of a selection is known for Poisson sampling and "
            "without amplification only."
        )
    release = PoissonSampledDpEvent(removed.rate, GaussianDpEvent(removed.noise_multiplier))
    return SelfComposedDpEvent(release, count)
